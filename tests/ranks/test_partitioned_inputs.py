"""Inputs of checkpoints that are split over a model-parallel group: gradients of whole ones, a part of the memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks.pool import RankPool, open_collectives
from tests.support.trainers import tiered
from tiered_zero.activations.checkpointing import PartitionedInputs, _Checks, _Part
from tiered_zero.deepspeed import checkpointing
from tiered_zero.errors import ModelError


class Parallel:
    """What configure() takes as an mpu: all ranks are one group. `num_asked`: how often it was asked for."""

    num_asked = 0

    def get_model_parallel_group(self) -> Any:
        Parallel.num_asked += 1
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


def gradients(run: Any, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Of the weights and of an input that is transposed, has 15 elements a row, and goes beside a mask and a weight."""
    torch.manual_seed(seed)
    layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)).to(dtype)
    x = torch.randn(5, 3, dtype=dtype).t().requires_grad_()
    mask = torch.rand(3, 1) < 0.7

    def block(x: Tensor, mask: Tensor, weight: Tensor, layer: nn.Module) -> Tensor:
        return torch.dropout(layer(x).tanh() @ weight, 0.2, True) * mask

    y = x
    for layer in layers:
        y = run(block, y, mask, layers[0].weight, layer)
    y.float().square().sum().backward()
    return [x.grad, *(param.grad for param in layers.parameters())]  # type: ignore[list-item]


def train_in_parts(_: str) -> dict[str, Any]:
    ranks, found = open_collectives(60), {}
    kept: list[Any] = []
    pack = PartitionedInputs.pack

    def packed(self: PartitionedInputs, tensor: Tensor) -> Any:
        kept.append(pack(self, tensor))
        return kept[-1]

    PartitionedInputs.pack = packed  # type: ignore[method-assign]
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for run in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
                for in_cpu in (False, True):
                    whole = gradients(lambda function, *args: function(*args), dtype)
                    checkpointing.configure(Parallel(), partition_activations=True, checkpoint_in_cpu=in_cpu)
                    kept.clear()
                    Parallel.num_asked = 0
                    split = gradients(run, dtype)
                    assert not Parallel.num_asked, "the group is asked for in configure(), not at each checkpoint"
                    checkpointing.partition_activations_in_checkpoint(False)
                    parts = sorted({part.memory.numel() for part in kept if isinstance(part, _Part)})
                    same = all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))
                    found[f"{dtype} {run.__name__} {in_cpu}"] = (same, parts)
        checkpointing.configure(Parallel(), partition_activations=True)
        kept.clear()
        finish, num_waits = _Checks.finish, []

        def finish_counted(self: _Checks) -> None:
            num_waits.append(len(self.found))
            finish(self)

        _Checks.finish = finish_counted  # type: ignore[method-assign]
        try:
            gradients(checkpointing.checkpoint, torch.float32, seed=dist.get_rank())
        except ModelError as error:
            found["other inputs"] = str(error)
        _Checks.finish = finish  # type: ignore[method-assign]
        found["waits"] = num_waits
    finally:
        PartitionedInputs.pack = pack  # type: ignore[method-assign]
        checkpointing.configure(partition_activations=False, checkpoint_in_cpu=False)
        ranks.close()
    return found


def test_gradients_are_those_of_whole_inputs(ranks: RankPool) -> None:
    for found in ranks.run(train_in_parts, 2, ""):
        error = found.pop("other inputs")
        assert "expected the inputs of a checkpoint to be equal on all ranks" in error and "[3, 5]" in error
        assert found.pop("waits") == [6], "one comparison a backward, of all that three checkpoints gathered"
        assert len(found) == 8
        assert all(each == (True, [2, 8]) for each in found.values()), "half of 3 and of 15 elements, and no weight"


def test_without_a_group_it_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    try:
        checkpointing.configure(None, partition_activations=True)
        assert "no mpu with a group of several ranks" in caplog.text and caplog.records[0].levelno == logging.WARNING
    finally:
        checkpointing.configure(partition_activations=False)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x).tanh()
        return x.square().mean()


def train_in_an_engine(swap_path: str) -> dict[bool, Any]:
    """By whether inputs are split: what the ranks' equal training gives, and the bytes of checkpoints' inputs."""
    found = {}
    unpack, kept = PartitionedInputs.unpack, []

    def counted(self: PartitionedInputs, packed: Any) -> Tensor:
        kept.append(packed.memory.nbytes)
        return unpack(self, packed)

    PartitionedInputs.unpack = counted  # type: ignore[method-assign]
    for is_split in (False, True):
        with tiered(Checkpointed(), Path(swap_path), ("cpu", "cpu"), clipping=0.5) as engine:
            checkpointing.configure(Parallel(), partition_activations=is_split)
            kept.clear()
            x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
            for _ in range(2):
                engine.backward(engine(x))
                engine.step()
            weights = {name: value.numpy() for name, value in engine.module.state_dict().items()}
            found[is_split] = {"kept": list(kept), "grad": x.grad.numpy(), **weights}  # type: ignore[union-attr]
    checkpointing.configure(partition_activations=False)
    PartitionedInputs.unpack = unpack  # type: ignore[method-assign]
    return found


def test_inside_of_an_engine_each_rank_saves_half(ranks: RankPool, swap_path: Path) -> None:
    """Of three inputs of 128 KiB in each of two steps."""
    for found in ranks.run(train_in_an_engine, 2, str(swap_path)):
        whole, split = found[False], found[True]
        assert (whole.pop("kept"), split.pop("kept")) == ([], [64 << 10] * 6)
        assert all((whole[name] == split[name]).all() for name in whole)
