"""What a step, a save and a load execute grows in a straight line with the number of units."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import CodeType

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.configs import ADAMW, config_of, zero_section
from tests.support.visits import LineCount

SIZES = (32, 64, 128)

Lines = dict[str, Counter[CodeType]]

WAITS = {"NativeTransfer.finished_within", "IOTransfer.wait", "NativeTransfer.done"}
"""As late as the disk is, threads wait for a transfer and look at those before it: a few lines a unit more or fewer."""


class Chain(nn.Module):
    """Blocks of one small layer, each a unit of its own."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.sum()


def count_lines(num_blocks: int, tier: str, update: str, path: Path) -> Lines:
    """Return the lines that each function executes in a step and a save, and the calls of each in a load."""
    zero = zero_section(tier, tier, path, sub_group_size=1)
    runtime = {"device": "cpu", "device_memory_limit": "1 MiB", "update": update, "unit_size_cap": 6}
    config = config_of(zero, optimizer=ADAMW, tiered_zero=runtime)
    count, lines = LineCount(), Lines()
    with count.on_threads(), tiered_zero.initialize(model=Chain(num_blocks), config=config)[0] as engine:
        assert len(engine.plan.tiers.units) == num_blocks

        def step() -> None:
            engine.backward(engine(torch.ones(1, 2)))
            engine.step()

        for _ in range(3):
            step()
        engine.flush()
        with count.counting() as lines["a step"]:
            step()
            engine.flush()
        if tier == "cpu":
            with count.counting() as lines["a save"]:
                engine.save_checkpoint(path / "tags")
            with count.counting(calls_alone=True) as lines["a load"]:
                engine.load_checkpoint(path / "tags")
    return {
        act: Counter({code: number for code, number in counted.items() if code.co_qualname not in WAITS})
        for act, counted in lines.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "update"), [("cpu", "overlapped"), ("nvme", "barrier")])
def test_lines_grow_with_units_in_a_straight_line(tier, update, swap_path, one_thread):
    """A loop over units inside a loop over units grows four times as much from 64 to 128 as from 32 to 64, a straight
    line twice. The steps before have ended on every thread, and so has the step that is counted."""
    few, some, many = (count_lines(num_blocks, tier, update, swap_path / str(num_blocks)) for num_blocks in SIZES)
    for act in many:
        bent = {
            code.co_qualname: (few[act][code], some[act][code], count)
            for code, count in many[act].items()
            if count - some[act][code] > 3 * (some[act][code] - few[act][code]) + 8 * SIZES[-1]
        }
        assert not bent, f"lines that {act} executes with {SIZES} units: {bent}"
        first, second = (after[act].total() - before[act].total() for before, after in ((few, some), (some, many)))
        assert second < 2.3 * first, f"lines that {act} adds with 64 and with 128 more units: {first}, {second}"
