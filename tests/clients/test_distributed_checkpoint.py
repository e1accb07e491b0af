"""PyTorch's own recipe over optimizers that tools have trained: nothing is lost, and DTensors are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import tiered_zero
from tests.clients import dcp_child
from tests.clients.conftest import ADAMW, make_trainer, offloaded, seen
from tests.ranks.torchrun import run
from tests.support.trainers import Record, assert_same_bits
from tiered_zero.errors import ModelError
from tiered_zero.optim import OffloadedOptimizer, ZeroRedundancyOptimizer

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

OPTIONS = [
    {},
    {"flatten_optimizer_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "default")
def test_state_that_trainer_has_made_moves_to_another(options: dict[str, Any], swap_path: Path, tmp_path: Path) -> None:
    """Three steps of Trainer, the recipe into a plain optimizer over a new model, and into an offloaded one of it."""
    chosen = StateDictOptions(**options)
    first = make_trainer(tmp_path / "first", offloaded("nvme", swap_path), [], max_steps=3)
    first.train()
    model, state = get_state_dict(first.model, first.optimizer.optimizer, options=chosen)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = seen(first)
    for device in (None, "nvme"):
        second = make_trainer(tmp_path / "second", offloaded(device, swap_path), [])
        optimizer = second.create_optimizer()
        model, state = get_state_dict(second.model, optimizer, options=chosen)
        dcp.load({"model": model, "optimizer": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        set_state_dict(
            second.model, optimizer, model_state_dict=model, optim_state_dict=state, options=chosen
        )  # fmt: skip
        states = optimizer.state_dict()["state"]
        values = [value for index in sorted(states) for _, value in sorted(states[index].items())]
        found = Record(expected.seen[: -len(values)] + values, dict(second.model.state_dict()))
        assert_same_bits(expected, found)
        getattr(optimizer, "close", lambda: None)()


def test_two_ranks_at_stage_3(swap_path: Path, tmp_path: Path) -> None:
    """full_state_dict with cpu_offload, and the default: a new engine goes on with the bits of the first."""
    run([dcp_child.__file__, str(swap_path), str(tmp_path)], tmp_path)


def sharded_linear() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return distribute_module(nn.Linear(4, 4), init_device_mesh("cpu", (1,)))


def give_to_engine(model: nn.Module) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "tiered_zero": {"device": "cpu"}}
    tiered_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)


def give_to_optimizer(model: nn.Module) -> None:
    OffloadedOptimizer(model.parameters(), torch.optim.AdamW, {"device": "cpu"}, **ADAMW)


def give_to_zero(model: nn.Module) -> None:
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)


GIVE = [give_to_engine, give_to_optimizer, give_to_zero]


@pytest.mark.parametrize("give", GIVE, ids=lambda give: give.__name__)
def test_dtensors_are_refused_by_name(give: Callable[[nn.Module], None], tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises((ModelError, ValueError), match="DTensor"):
            give(sharded_linear())
    finally:
        torch.distributed.destroy_process_group()
