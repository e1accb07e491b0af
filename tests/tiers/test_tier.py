"""What every tier promises, tried on each: device, host, nvme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.tier_rig import TIERS, Rig, open_rig, random_bytes
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.sizes import PAGE_NBYTES
from tiered_zero.tiers.tier import Home, Slot, UnitUpdate, as_bytes, read_slot, write_slot


@pytest.fixture(params=TIERS)
def rig(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[Rig]:
    with open_rig(request.param, swap_path) as rig:
        yield rig


def write(rig: Rig, slot: Slot, data: torch.Tensor, offset: int = 0, after: Transfer | None = None) -> None:
    """`after`: compute's mark, on a lane."""
    with rig.buffers.lease(data.numel()) as lease:
        lease.tensor.copy_(data)
        rig.tier.write(slot, lease.tensor, offset, after).wait()


def read(rig: Rig, slot: Slot, nbytes: int, offset: int = 0) -> torch.Tensor:
    with rig.buffers.lease(nbytes) as lease:
        rig.tier.read(slot, lease.tensor, offset).wait()
        return lease.tensor.clone()


@pytest.mark.parametrize("num_pages", [1, 2, 7])
def test_what_was_written_is_read(rig: Rig, num_pages: int) -> None:
    data = random_bytes(num_pages * PAGE_NBYTES)
    slot = rig.tier.reserve("a", data.numel(), "param")
    assert (slot.name, slot.nbytes, slot.kind) == ("a", data.numel(), "param")
    write(rig, slot, data)
    assert torch.equal(read(rig, slot, data.numel()), data)


def test_offsets_are_the_slots_own(rig: Rig) -> None:
    first, second = (rig.tier.reserve(name, 4 * PAGE_NBYTES, "state") for name in "ab")
    data = {slot.name: random_bytes(4 * PAGE_NBYTES) for slot in (first, second)}
    for slot in (first, second):
        for page in (2, 0, 3, 1):
            part = slice(page * PAGE_NBYTES, (page + 1) * PAGE_NBYTES)
            write(rig, slot, data[slot.name][part], part.start)
    for slot in (second, first):
        for start, num_pages in ((0, 4), (1, 1), (2, 2), (3, 1)):
            part = slice(start * PAGE_NBYTES, (start + num_pages) * PAGE_NBYTES)
            assert torch.equal(read(rig, slot, part.stop - part.start, part.start), data[slot.name][part])
    fresh = random_bytes(PAGE_NBYTES)
    write(rig, first, fresh, 2 * PAGE_NBYTES)
    data["a"][2 * PAGE_NBYTES : 3 * PAGE_NBYTES] = fresh
    assert torch.equal(read(rig, first, PAGE_NBYTES, 2 * PAGE_NBYTES), fresh)
    assert torch.equal(read(rig, second, 4 * PAGE_NBYTES), data["b"])


@pytest.mark.parametrize("num_pages", [1, 2, 3, 9])
def test_a_fetch_fills_device_memory_through_fewer_buffers_than_chunks(rig: Rig, num_pages: int) -> None:
    data = random_bytes(num_pages * PAGE_NBYTES)
    slot = rig.tier.reserve("a", data.numel(), "param")
    for page in range(num_pages):
        write(rig, slot, data[page * PAGE_NBYTES : (page + 1) * PAGE_NBYTES], page * PAGE_NBYTES)
    out = torch.zeros(data.numel() // 2, dtype=torch.bfloat16)
    rig.runtime.accelerator.wait_on_compute(rig.tier.fetch(slot, out))
    assert torch.equal(as_bytes(out), data)


def test_a_fetch_of_less_than_the_slot(rig: Rig) -> None:
    data = random_bytes(3 * PAGE_NBYTES)
    slot = rig.tier.reserve("a", data.numel(), "param")
    write(rig, slot, data)
    out = torch.zeros(3 * PAGE_NBYTES - 100, dtype=torch.uint8)
    rig.tier.fetch(slot, out).wait()
    assert torch.equal(out, data[: out.numel()])


def publish(rig: Rig, job: Callable[[], object]) -> UnitUpdate:
    """What an update on its lane publishes."""
    unit_update = UnitUpdate()

    def update() -> None:
        try:
            job()
        except Exception as error:
            unit_update.fail(error)
        unit_update.complete()

    rig.runtime.accelerator.lane("optimizer").submit(update)
    return unit_update


def test_a_fetch_waits_for_the_update_that_writes_the_slot(rig: Rig) -> None:
    slot = rig.tier.reserve("a", 3 * PAGE_NBYTES, "param")
    old, new = random_bytes(3 * PAGE_NBYTES), random_bytes(3 * PAGE_NBYTES)
    write(rig, slot, old)
    mark = rig.runtime.accelerator.record_compute()
    update = publish(rig, lambda: write(rig, slot, new, after=mark))
    out = torch.zeros_like(new)
    rig.tier.fetch(slot, out, after=update).wait()
    assert torch.equal(out, new)
    rig.tier.fetch(slot, out.zero_(), after=update).wait()
    assert torch.equal(out, new)


def test_a_failed_update_fails_the_fetch_behind_it(rig: Rig) -> None:
    slot = rig.tier.reserve("a", 3 * PAGE_NBYTES, "param")
    write(rig, slot, random_bytes(3 * PAGE_NBYTES))

    def fail() -> None:
        raise RuntimeError("the update failed")

    update = publish(rig, fail)
    out = torch.zeros(3 * PAGE_NBYTES, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="the update failed"):
        rig.tier.fetch(slot, out, after=update).wait()
    with pytest.raises(RuntimeError, match="the update failed"):
        update.written.wait()
    with pytest.raises(RuntimeError, match="the update failed"):
        rig.tier.fetch(slot, out, after=update).wait()  # also when it had failed before
    rig.tier.fetch(slot, out).wait()  # the tier itself goes on


def test_a_view_is_the_slot_itself_or_there_is_none(rig: Rig) -> None:
    slot = rig.tier.reserve("a", 2 * PAGE_NBYTES, "state")
    data = random_bytes(2 * PAGE_NBYTES)
    write(rig, slot, data)
    view = slot.tensor
    assert (view is None) == (rig.tier.name == "nvme")
    if view is not None:
        assert view.dtype == torch.uint8 and torch.equal(view, data)
        view[:PAGE_NBYTES] = 7
        assert torch.equal(read(rig, slot, PAGE_NBYTES), torch.full((PAGE_NBYTES,), 7, dtype=torch.uint8))


@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_slots_as_plain_cpu_tensors(rig: Rig, num_pages: int) -> None:
    slot = rig.tier.reserve("a", 8 * PAGE_NBYTES, "param")
    home = Home(rig.tier, slot)
    whole = random_bytes(8 * PAGE_NBYTES)
    write_slot(home, 0, whole, rig.staging)
    part = torch.randn(num_pages * PAGE_NBYTES // 4)
    write_slot(home, 2 * PAGE_NBYTES, part, rig.staging)
    whole[2 * PAGE_NBYTES : (2 + num_pages) * PAGE_NBYTES] = as_bytes(part)
    assert torch.equal(read_slot(home, 0, whole.numel(), rig.staging), whole)
    got = read_slot(home, 2 * PAGE_NBYTES, part.nbytes, rig.staging).view(torch.float32)
    assert torch.equal(got, part)
    got.zero_()  # a copy: the slot keeps its bytes
    assert torch.equal(read_slot(home, 0, whole.numel(), rig.staging), whole)
