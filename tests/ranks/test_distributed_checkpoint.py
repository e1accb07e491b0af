"""PyTorch's own checkpoint recipe on ranks: of engines at every stage, of our optimizers under DDP, and from FSDP2."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tiered_zero
from tests.ranks.pool import RankPool
from tests.support.inspection.insides import DcpReader, state_view
from tests.support.models import rows, two_layers
from tests.support.trainers import Plain
from tiered_zero.optim import OffloadedOptimizer

CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
STAGES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "offload_optimizer": CPU},
    {"stage": 2, "offload_optimizer": NVME},
    {"stage": 3, "offload_optimizer": NVME, "offload_param": CPU},
]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make_config(path: str, zero: dict[str, Any]) -> dict[str, Any]:
    section = copy.deepcopy(zero)
    for value in section.values():
        if isinstance(value, dict) and value["device"] == "nvme":
            value["nvme_path"] = path
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "zero_optimization": section,
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60},
    }


def make_engine(path: str, zero: dict[str, Any]) -> tiered_zero.Engine:
    model = two_layers()
    return tiered_zero.initialize(model=model, optimizer=adam(model), config=make_config(path, zero))[0]


def steps(trainer: Any, first: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Take three steps, each rank over other rows; return the weights then, on the CPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for index in range(first, first + 3):
        trainer.backward(trainer(rows(world * index + rank).to(dtype)).square().mean())
        trainer.step()
    return [value.detach().clone() for value in trainer.module.state_dict().values()]


def move(source: Any, target: Any, path: str, **chosen: Any) -> None:
    options = StateDictOptions(**chosen)
    model, optimizer = get_state_dict(source.module, source.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    load(target, path, options)


def load(target: Any, path: str, options: StateDictOptions | None = None) -> None:
    model, optimizer = get_state_dict(target.module, target.optimizer, options=options)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(target.module, target.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)


@contextlib.contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.barrier()


def move_engines(swap_path: str, saved: str, zero: dict[str, Any]) -> None:
    with group():
        for number, options in enumerate(({}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True})):
            with make_engine(swap_path, zero) as source, make_engine(swap_path, zero) as target:
                steps(source, 0)
                with patch.object(state_view.logger, "warning") as warning:
                    move(source, target, f"{saved}/{number}", **options)
                assert not warning.called, "what another rank has is trained"
                assert all(map(torch.equal, steps(source, 3), steps(target, 3))), options
                assert target.global_steps == 3


@pytest.mark.parametrize("zero", STAGES, ids=lambda zero: f"stage{zero['stage']}")
def test_engines_keep_their_moments(zero: dict[str, Any], ranks: RankPool, swap_path: Path, tmp_path: Path) -> None:
    ranks.run(move_engines, 2, str(swap_path), str(tmp_path), zero)


def move_offloaded(swap_path: str, saved: str) -> None:
    """The module is the one inside of DistributedDataParallel: all names are those of one process."""
    with group():
        for device in ("cpu", "nvme"):
            trainers = []
            for _ in range(2):
                offload = {"device": device, "nvme_path": swap_path}
                trainer = Plain(
                    two_layers(),
                    lambda model, to=offload: OffloadedOptimizer(model.parameters(), torch.optim.Adam, to, lr=0.01),
                )
                trainer.module = DistributedDataParallel(trainer.module)
                trainers.append(trainer)
            steps(trainers[0], 0)
            move(*trainers, f"{saved}/{device}")
            assert all(map(torch.equal, *(steps(trainer, 3) for trainer in trainers)))
            for trainer in trainers:
                trainer.optimizer.close()


def test_an_offloaded_optimizer_keeps_its_moments_under_ddp(ranks: RankPool, swap_path: Path, tmp_path: Path) -> None:
    ranks.run(move_offloaded, 2, str(swap_path), str(tmp_path))


def recipe(name: str, ck: str = "", **names: Any) -> dict[str, Any]:
    """Run a recipe of docs/migrating.md. Returns its names. `ck`: the directory that it calls so."""
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    code = page.partition(f"<!-- recipe: {name} -->\n```python\n")[2].partition("```")[0]
    assert code, name
    names = {**vars(state_dict), "dcp": dcp, "DcpReader": DcpReader, "tiered_zero": tiered_zero, **names}
    exec(code.replace('"ck"', repr(ck)), names)
    return names


def in_fsdp2() -> Plain:
    """The same weights each time, with a moment of zeros."""
    return Plain(fully_shard(two_layers(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),))), adam)


def contents(trainer: Plain) -> list[torch.Tensor]:
    """Weights and moments, whole."""
    states = [trainer.optimizer.state[param] for param in trainer.module.parameters()]
    values = [*trainer.module.parameters(), *(own[kind] for own in states for kind in ("exp_avg", "exp_avg_sq"))]
    return [value.detach().full_tensor() for value in values]


def move_from_fsdp2(swap_path: str, saved: str) -> None:
    """Masters and moments of an engine in bf16 are those of the fp32 run too."""
    with group():
        source = in_fsdp2()
        steps(source, 0)
        states = get_state_dict(source.module, source.optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=saved)
        expected = contents(source)
        for more in ({}, {"bf16": {"enabled": True}}):
            model, config = two_layers(), {**make_config(swap_path, STAGES[3]), **more}
            for param in model.parameters():
                param.data.zero_()
            with recipe("from FSDP2", model=model, optimizer=adam(model), config=config, path=saved)[
                "engine"
            ] as engine:
                names = [name for name, _ in model.named_parameters()]
                found = [engine.peek(name) for name in names]
                found += [engine.peek(name, kind) for name in names for kind in ("exp_avg", "exp_avg_sq")]
                assert all(map(torch.equal, expected, found)), more
                assert all(values["step"] == 3 for values in engine.optimizer.state_dict()["state"].values())


def move_to_fsdp2(swap_path: str, saved: str) -> None:
    """A run in bf16 loses nothing: masters go there."""
    with group():
        for more in ({}, {"bf16": {"enabled": True}}):
            model = two_layers()
            config = {**make_config(swap_path, STAGES[3]), **more}
            with tiered_zero.initialize(model=model, optimizer=adam(model), config=config)[0] as engine:
                steps(engine, 0, next(model.parameters()).dtype)
                engine.save_checkpoint(f"{saved}/ck")
                names = [name for name, _ in model.named_parameters()]
                expected = [engine.peek(name) for name in names]
                expected += [engine.peek(name, kind) for name in names for kind in ("exp_avg", "exp_avg_sq")]
            target = in_fsdp2()
            recipe("to FSDP2", ck=f"{saved}/ck", model=target.module, optimizer=target.optimizer)
            assert all(map(torch.equal, expected, contents(target))), more
            assert all(own["step"] == 3 for own in target.optimizer.state.values())


def test_a_checkpoint_of_fsdp2_comes_in(ranks: RankPool, swap_path: Path, tmp_path: Path) -> None:
    ranks.run(move_from_fsdp2, 2, str(swap_path), str(tmp_path / "saved"))


def test_a_checkpoint_goes_to_fsdp2(ranks: RankPool, swap_path: Path, tmp_path: Path) -> None:
    ranks.run(move_to_fsdp2, 2, str(swap_path), str(tmp_path / "saved"))
