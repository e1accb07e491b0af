"""Units and activations do not split each other's blocks: what units take of the device stays what the plan says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.lagging.faults import Plant
from tests.lagging.test_device_updates import Net
from tests.support.inspection.insides import FlatStorage
from tests.support.trainers import tiered
from tiered_zero.hardware.device import streams
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.device.streams import CudaAccelerator

BLOCK_NBYTES = 512

NUM_STEPS = 4
UNIT_NUMEL = 4096
"""Of a layer's weight and bias, padded to pages."""


def units_share_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaAccelerator, "unit_memory", Accelerator.unit_memory)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No fault."""


@dataclass
class Found:
    """Bytes: reserved by the pool of units at most; planned; and at all addresses that units have had."""

    reserved: int
    planned: int
    touched: int


def train_with_odd_sizes(device: LaggingDevice, swap_path: Path, plant: Plant) -> Found:
    """Train on batches of another size in each step, with room for three units on the device."""
    device.set(splits_blocks=1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = device.private_nbytes()
    pages: set[int] = set()
    fill = FlatStorage.fill

    def fill_and_note(self: FlatStorage) -> None:
        fill(self)
        start, nbytes = self.flat.data_ptr(), self.flat.nbytes
        pages.update(range(start // BLOCK_NBYTES, (start + nbytes) // BLOCK_NBYTES))

    zero = {"stage3_max_live_parameters": 3 * UNIT_NUMEL, "stage3_prefetch_bucket_size": UNIT_NUMEL}
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        patch.setattr(FlatStorage, "fill", fill_and_note)
        with tiered(Net(12), swap_path, ("cpu", "cpu"), zero=zero, runtime={"device": "cuda"}) as engine:
            for step in range(NUM_STEPS):
                engine.backward(engine(torch.ones(45 + 5 * step, 48, device="cuda")))
                engine.step()
            planned = engine.plan.nbytes("device", "param_window")
        return Found(device.private_nbytes() - before, planned, len(pages) * BLOCK_NBYTES)


@on_device
def test_units_reserve_what_is_planned(device: LaggingDevice, swap_path: Path) -> None:
    found = train_with_odd_sizes(device, swap_path, nothing)
    assert found.reserved == found.planned == found.touched == 3 * UNIT_NUMEL * 4
    shared = train_with_odd_sizes(device, swap_path, units_share_blocks)
    assert shared.reserved == 0 and shared.touched > shared.planned, "units move, as their blocks are cut"


@on_device
def test_what_units_have_left_serves_others_before_memory_runs_out(device: LaggingDevice) -> None:
    accelerator = CudaAccelerator(torch.device("cuda"))
    with accelerator.unit_memory():
        unit = torch.empty(UNIT_NUMEL, device="cuda")
    address = unit.data_ptr()
    del unit
    torch.cuda.empty_cache()
    device.set(capacity_nbytes=torch.cuda.memory_reserved())
    assert torch.empty(UNIT_NUMEL, device="cuda").data_ptr() == address
    accelerator.close()


@pytest.mark.parametrize("cause", ["backend", "MemPool"])
@on_device
def test_without_pools_units_share_the_allocators_blocks(device: LaggingDevice, cause: str, swap_path: Path) -> None:
    """`backend:cudaMallocAsync` has none."""

    def refuse(use_on_oom: bool) -> None:
        raise RuntimeError("this allocator has no pools")

    lines: list[str] = []
    before = device.private_nbytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.logger, "warning", lambda text, *values: lines.append(text % values))
        patch.setattr(torch.cuda, "MemPool", refuse)
        if cause == "backend":
            patch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
        with tiered(Net(12), swap_path, ("cpu", "cpu"), runtime={"device": "cuda"}) as engine:
            engine.backward(engine(torch.ones(45, 48, device="cuda")))
            engine.step()
    assert device.private_nbytes() == before
    [line] = [line for line in lines if "paged units share" in line]
    assert ("cudaMallocAsync" if cause == "backend" else "this allocator has no pools") in line
