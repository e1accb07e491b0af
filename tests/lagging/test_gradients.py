"""What gradients cost on their way from a device that lags: copies under way, and waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.support.inspection.insides import GradCopy, GradNorm, gradient
from tests.support.trainers import adamw, tiered
from tiered_zero.hardware.device.accelerator import Lane, LaneTransfer
from tiered_zero.hardware.memory.host_memory import StagingPool
from tiered_zero.plan import staging

NUM_SMALL = 20


class Block(nn.Module):
    """One unit of many small parameters and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(256, 256, bias=False)
        self.small = nn.ParameterList(nn.Parameter(torch.randn(256)) for _ in range(NUM_SMALL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.small:
            x = x * scale
        return self.large(x).square().mean()


@on_device
def test_one_buffer_is_filled_while_the_other_is_added(device: LaggingDevice, swap_path: Path) -> None:
    """Both are in use at each sum of a large gradient but the last; many small ones come in one, waited for once."""
    patch = pytest.MonkeyPatch()
    patch.setattr(staging, "MAX_AUTO_STAGING_NBYTES", 64 << 10)  # a quarter of the large gradient
    patch.setattr(gradient, "BATCH_NBYTES", 32 << 10)  # which goes alone
    pools: list[StagingPool] = []
    sums: list[tuple[int, int]] = []
    build, add = gradient.InFlightGradients.__init__, GradNorm.copy_threaded

    def build_with(self: gradient.InFlightGradients, *parts: Any) -> None:
        pools.append(parts[2])
        build(self, *parts)

    def add_counted(self: GradNorm, copies: Sequence[GradCopy]) -> None:
        sums.append((len(copies), pools[0].count - pools[0].num_free))
        add(self, copies)

    patch.setattr(gradient.InFlightGradients, "__init__", build_with)
    patch.setattr(GradNorm, "copy_threaded", add_counted)
    zero, runtime = {"stage3_param_persistence_threshold": 0}, {"device": "cuda", "update": "barrier"}
    try:
        with tiered(Block(), swap_path, ("none", "cpu"), adamw, 2, 1.0, zero=zero, runtime=runtime) as engine:
            for number in range(2):
                device.set(delay_seed=number)
                assert not sums, "the first of a step is copied"
                engine.backward(engine(torch.ones(8, 256, device="cuda")))
                engine.step()
    finally:
        patch.undo()
    assert sorted(sums) == [(1, 1), (1, 2), (1, 2), (1, 2), (NUM_SMALL, 1)]


@on_device
def test_small_gradients_of_a_unit_leave_together(device: LaggingDevice, swap_path: Path) -> None:
    """In one job of the lane, with one mark of compute and one to wait for; a large gradient has its own."""
    patch = pytest.MonkeyPatch()
    patch.setattr(gradient, "BATCH_NBYTES", 32 << 10)
    jobs: list[tuple[int, LaneTransfer]] = []
    submit = Lane.submit

    def submit_counted(self: Lane, job: Any, after: Any = (), holds: Any = (), waits: bool = True) -> LaneTransfer:
        transfer = submit(self, job, after, holds, waits)
        if self.name == "reduce":
            jobs.append((len(holds), transfer))
        return transfer

    patch.setattr(Lane, "submit", submit_counted)
    zero, runtime = {"stage3_param_persistence_threshold": 0}, {"device": "cuda", "update": "barrier"}
    try:
        with tiered(Block(), swap_path, ("none", "cpu"), adamw, 1, 1.0, zero=zero, runtime=runtime) as engine:
            loss = engine(torch.ones(8, 256, device="cuda"))
            torch.accelerator.synchronize()
            device.take_counts()
            engine.backward(loss)
            for _, transfer in jobs:
                assert transfer.wait_launched() is None
            counts = device.take_counts()
    finally:
        patch.undo()
    assert sorted(num_gradients for num_gradients, _ in jobs) == [1, NUM_SMALL]
    assert counts["copy.d2h.async"] == 1 + NUM_SMALL and counts.get("host_wait.event", 0) <= len(jobs)
