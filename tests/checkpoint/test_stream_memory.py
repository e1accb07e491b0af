"""Saves and loads stream: what they take besides the run's own memory is fixed, whatever the run holds.

save   8 scratch buffers of 1 MiB; none of them grows with the state
load   12 buffers of 2 MiB for the files, and for remainders one sub-group's masters in fp32
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.trainers import tiered
from tiered_zero.hardware.memory.host_memory import trim_malloc
from tiered_zero.sizes import MIB

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 1024
NUM_LAYERS = 6
STATE_NBYTES = 12 * NUM_LAYERS * WIDTH**2
"""72 MiB of masters and moments."""

MOST_NBYTES = 40 * MIB
"""A load's buffers, 4 MiB of masters, and 12 for threads and torch's own: little more than half of the state."""


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def growth_of_the_peak(act: Callable[[], Any]) -> int:
    """The most that the process was larger during `act` than before it."""
    gc.collect()
    trim_malloc()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS:")
    act()
    return resident("VmHWM:") - before


def make(swap_path: Path, placement: tuple[str, str], runtime: dict[str, Any]) -> tiered_zero.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    zero = {"sub_group_size": 1 << 20}
    return tiered(model, swap_path, placement, zero=zero, runtime=runtime, bf16={"enabled": True})


def step(engine: tiered_zero.Engine) -> None:
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.flush()


@pytest.mark.parametrize(
    ("placement", "runtime"),
    [
        (("cpu", "cpu"), {}),
        (("nvme", "nvme"), {}),
        (("nvme", "nvme"), {"state_format": "bf16_remainder"}),
        (("cpu", "cpu"), {"checkpoint": {"async": True}}),
    ],
    ids=["host", "nvme", "remainder", "async"],
)
def test_the_peak_is_that_of_training_and_fixed_buffers(
    placement: tuple[str, str], runtime: dict[str, Any], swap_path: Path, tmp_path: Path
) -> None:
    with make(swap_path, placement, runtime) as engine:
        step(engine)
        planned = {tier: engine.plan.nbytes(tier) for tier in ("device", "host", "nvme")}

        def save() -> None:
            engine.save_checkpoint(tmp_path, tag="one")
            engine.flush()

        save()  # threads and their stacks are there now
        assert (tmp_path / "one" / "manifest.json").stat().st_size < MIB
        assert growth_of_the_peak(save) < MOST_NBYTES < STATE_NBYTES
        assert growth_of_the_peak(lambda: engine.load_checkpoint(tmp_path)) < MOST_NBYTES
        report = engine.memory_report()
        assert all(
            sum(kind["peak"] for kind in report.get(tier, {}).values()) <= nbytes for tier, nbytes in planned.items()
        )


def test_twenty_saves_leave_nothing(swap_path: Path, tmp_path: Path) -> None:
    """Neither Python objects nor memory of the system."""
    with make(swap_path, ("cpu", "cpu"), {}) as engine:
        step(engine)
        for number in range(22):
            if number == 2:
                gc.collect()
                trim_malloc()
                tracemalloc.start()
                first = resident("VmRSS:"), tracemalloc.get_traced_memory()[0]
            engine.save_checkpoint(tmp_path, tag="one")
            engine.flush()
        gc.collect()
        trim_malloc()
        last = resident("VmRSS:"), tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert last[0] - first[0] < 8 * MIB
        assert last[1] - first[1] < MIB
