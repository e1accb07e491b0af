"""What a step asks of CUDA: memory, copies, events and waits, within bounds that grow with the units alone."""

from __future__ import annotations

import json

import pytest
import torch

from tests.fake_cuda.child import FakeCuda, on_fake_cuda
from tests.fake_cuda.training import PLACEMENTS, ROWS, WINDOW, Tower, build, step
from tests.support import inspection
from tiered_zero.sizes import MIB

pytestmark = pytest.mark.cuda_wheel

NUM_WARM, NUM_COUNTED = 3, 4
LARGE_WIDTH = 1792
"""Units of 12.25 MiB: torch reserves up to 1 MiB in segments of 2, up to 10 MiB in segments of 20, and larger blocks
each in one of its own, in whole 2 MiB."""


def pool_nbytes() -> int:
    """Bytes that private pools of torch's allocator hold."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


def bounds(placement: str, num_units: int) -> dict[str, int]:
    """Return the most that a step may ask for. A unit has a weight and a bias."""
    pages, keeps = not placement.startswith("none"), placement == "none/none"
    fetches = 0 if keeps else 2 * num_units  # for forward and for backward; of parameters that stay, what updates bring
    flushes = 0 if keeps else num_units  # of gradients to their home
    transfers = fetches + flushes
    return {
        "mallocs": 0,
        "frees": 0,
        "h2d_copies": fetches + 1,  # and the batch
        "d2h_copies": (0 if keeps else 2 * num_units) + 2,  # gradients; the norm, and whether all of it is finite
        "pageable_copies": 2,  # the batch and the norm
        # for each transfer the mark of compute that it follows, its own, and two for its time; one for each update
        "events_recorded": 4 * transfers + num_units + 4,
        "event_waits": transfers + 2,  # of the update, and of who takes a staging buffer again
        "spinning_event_waits": 0,
        # the norm; a fetch from NVMe gives back its buffer
        "stream_waits": 3 + (fetches if pages and placement.startswith("nvme") else 0),
        "device_waits": 0,
        "registrations": 0,
        "misuses": 0,
    }


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_fake_cuda
def test_a_step_asks_for_no_more_than_its_units_need(
    device: FakeCuda, placement: str, clipping: float, swap_path: str
) -> None:
    most: dict[str, dict[int, int]] = {}
    for num_units in (8, 16):
        allowed = bounds(placement, num_units)
        with build(Tower(num_units, width=64), placement, swap_path, clipping) as engine:
            assert len(inspection.pager(engine).units.by_unit) == num_units
            for _ in range(NUM_WARM):
                step(engine)
            for _ in range(NUM_COUNTED):
                before = device.counts()
                step(engine)
                after = device.counts()
                for name in allowed:
                    asked = after[name] - before[name]
                    most.setdefault(name, {})[num_units] = max(asked, most.get(name, {}).get(num_units, 0))
            for name, limit in allowed.items():
                assert most[name][num_units] <= limit, f"{most[name][num_units]} {name} of {limit}, {num_units} units"
    print(f"{placement} clip {clipping}, at most in a step of 8 and of 16 units:", json.dumps(most))


@on_fake_cuda
def test_the_pool_of_units_reserves_the_window(device: FakeCuda, swap_path: str) -> None:
    """In steps of several batch sizes, whose activations would split the blocks of units in a common pool."""
    tower = Tower(num_layers=6, width=LARGE_WIDTH)
    block_nbytes = -(-4 * tower.unit_numel // (2 * MIB)) * 2 * MIB
    with build(tower, "cpu/cpu", swap_path) as engine:
        planned = engine.plan.nbytes("device", "param_window")
        for number in range(6):
            step(engine, rows=ROWS + 300 * (number % 3))
        torch.cuda.synchronize()
        reserved, other = pool_nbytes(), torch.cuda.memory_reserved() - pool_nbytes()
        print(f"pool of units: reserved {reserved}, planned {planned}; outside of it {other}")
        # the plan counts either the units' bytes or the blocks that torch reserves for them
        assert 4 * WINDOW * tower.unit_numel <= planned <= reserved, f"reserved {reserved}, planned {planned}"
        assert reserved <= WINDOW * block_nbytes, f"reserved {reserved}, {WINDOW} blocks of {block_nbytes}"
    assert pool_nbytes() == 0, "the pool is given back with the engine"
    assert device.counts()["misuses"] == 0, "stderr names them"
