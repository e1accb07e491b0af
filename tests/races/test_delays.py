"""63 seeded delay schedules (`-m thorough`: 210) on the threaded accelerator, what is freed poisoned: no bit differs.

Every job of every lane starts and ends late by a seeded random time, so each schedule is another interleaving of
driver, gather, reduce and update; a wait that is missing somewhere meets a late partner in some of them, and reads NaN.
The schedules go round the nine placements, update policies, precisions, accumulation, clipping and prefetching, whose
cycles have no common length. That such a harness can fail is shown as well: with any one wait taken out it finds
differences.
"""

import functools
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.inspection.insides import GradientStore
from tests.support.models import ParityGPT, batch
from tests.support.trainers import PLACEMENTS, Plain, Record, adamw, follow, same_bits, tiered, train
from tiered_zero.concurrency.transfer import Completion, SharedWork
from tiered_zero.errors import TieredZeroError
from tiered_zero.hardware.device.accelerator import CpuAccelerator

CHUNK = 21
NUM_CHUNKS = (3, 10)
"""Of every run of the tests, and of a thorough one. In 63 schedules each two values of the cycles below meet."""

POLICIES = ("overlapped", "barrier", "overlapped", "overlapped", "overlapped")
PREFETCH = (None, 0, 3000, None, None, None, 9000)
COURSES = (("fp32", 1, 0.0), ("bf16", 2, 0.5), ("fp32", 1, 0.5), ("bf16", 1, 0.0))
"""Cycles of 9 placements, 5 policies, 7 prefetch buckets and 4 courses: all lengths are prime to each other."""


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT(num_blocks=1)


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 2 == 1)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


OPTIMIZERS = {"fp32": adamw, "bf16": momentum}
"""AdamW's square root is not the same with 16-bit gradients (see tests/parity/test_half.py)."""


@functools.cache
def reference(precision: str, accumulation: int, clipping: float) -> Record:
    dtype = torch.bfloat16 if precision == "bf16" else None
    plain = Plain(build(), OPTIMIZERS[precision], accumulation, clipping, dtype=dtype)
    return follow(lambda own: train(own, data, 3, accumulation), plain)


def run_schedule(seed: int, swap_path: Path) -> str:
    """What differs from plain PyTorch under this schedule; "" where nothing does."""
    precision, accumulation, clipping = COURSES[seed % 4]
    engine = tiered(
        build(),
        swap_path,
        PLACEMENTS[seed % 9],
        OPTIMIZERS[precision],
        accumulation,
        clipping,
        zero={"stage3_prefetch_bucket_size": PREFETCH[seed % 7]},
        runtime={"update": POLICIES[seed % 5], "debug_delay_seed": seed, "debug_poison": True},
        bf16={"enabled": precision == "bf16"},
    )
    expected = reference(precision, accumulation, clipping)
    found = follow(lambda own: train(own, data, 3, accumulation), engine)
    seen = [str(i) for i, pair in enumerate(zip(expected.seen, found.seen, strict=True)) if not same_bits(*pair)]
    return ", ".join(
        seen + [name for name, value in expected.weights.items() if not same_bits(value, found.weights[name])]
    )


@pytest.mark.parametrize(
    "chunk",
    [*range(NUM_CHUNKS[0]), *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(*NUM_CHUNKS))],
)
def test_no_schedule_changes_a_bit(chunk, swap_path):
    wrong = {}
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        if differences := run_schedule(seed, swap_path):
            wrong[seed] = differences
    assert not wrong


def test_the_schedules_cover_what_can_race():
    for one, other in itertools.combinations((9, 5, 7, 4), 2):
        assert len({(seed % one, seed % other) for seed in range(CHUNK * NUM_CHUNKS[0])}) == one * other
    every = range(CHUNK * NUM_CHUNKS[1])
    assert len({(PLACEMENTS[seed % 9], POLICIES[seed % 5], COURSES[seed % 4]) for seed in every}) == 9 * 2 * 4


def drop(*_: Any) -> None:
    """Takes the place of a wait."""


WAITS = {
    "compute for parameters": (CpuAccelerator, "wait_on_compute", range(0, 60, 7)),
    "the gradient check for gradients": (GradientStore, "wait_transfers", range(0, 60, 7)),
    "a unit for its update": (Completion, "wait", range(0, 60, 7)),
    "the update for state from disk": (SharedWork, "wait", (2, 5, 8, 11, 14, 17, 20)),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_is_found(name, swap_path, monkeypatch, caplog):
    """With one wait taken out, some schedule gives other bits, or the store refuses a read of what is being written."""
    caplog.set_level(logging.CRITICAL, "tiered_zero")
    owner, method, seeds = WAITS[name]
    monkeypatch.setattr(owner, method, drop)
    for seed in seeds:
        try:
            if run_schedule(seed, swap_path):
                return
        except TieredZeroError:
            return
    pytest.fail(f"without the wait of {name} nothing differs")
