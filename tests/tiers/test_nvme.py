"""The disk's own troubles: few buffers and many fetches, reads that fail before, in and after a fetch."""

from __future__ import annotations

import errno
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection import held_nbytes
from tests.support.tier_rig import Rig, open_rig, random_bytes
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import EngineFailedError, TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import IOSettings
from tiered_zero.sizes import PAGE_NBYTES
from tiered_zero.tiers.tier import Home, UnitUpdate, write_slot


def fill(rig: Rig, name: str, num_pages: int) -> tuple[Home, torch.Tensor]:
    data = random_bytes(num_pages * PAGE_NBYTES)
    home = Home(rig.tier, rig.tier.reserve(name, data.numel(), "param"))
    write_slot(home, 0, data, rig.staging)
    return home, data


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    num_buffers=st.integers(1, 4),
    buffer_pages=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=25)
def test_many_fetches_at_once_never_deadlock(
    sizes: list[int], num_buffers: int, buffer_pages: int, order: object
) -> None:
    engine = AiofilesEngine(direct=False, settings=IOSettings(queue_depth=2), io_timeout_s=120.0)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        options = {"buffer_nbytes": buffer_pages * PAGE_NBYTES, "num_buffers": num_buffers, "engine": engine}
        with open_rig("nvme", Path(path), lease_timeout_s=60.0, **options) as rig:  # type: ignore[arg-type]
            filled = [fill(rig, str(index), size) for index, size in enumerate(sizes)]
            updates = {index: UnitUpdate() for index in range(1, len(filled), 3)}

            def update() -> None:
                for index, unit_update in updates.items():
                    unit_update.add_pending(0, filled[index][1][:PAGE_NBYTES])
                    unit_update.computed.complete()
                for unit_update in updates.values():
                    unit_update.retire(0)
                    unit_update.complete()

            rig.runtime.accelerator.lane("update").submit(update)
            started = []
            for index, (home, data) in enumerate(filled):
                out = torch.zeros_like(data)
                started.append((rig.tier.fetch(home.slot, out, updates.get(index)), out, data))
            order.shuffle(started)  # type: ignore[attr-defined]
            for transfer, out, data in started:
                transfer.wait()
                assert torch.equal(out, data)
        engine.close()


def failing_reads(*numbers: int) -> SyncEngine:
    """Requests finish when they are waited for; the given reads (from 1) fail. If a fetch has several reads, a failed
    one may latch the store before the next is submitted: the fetch then raises EngineFailedError with the same text."""

    def before(kind: str, number: int) -> None:
        if kind == "read" and number in numbers:
            raise OSError(errno.EIO, "the disk failed")

    return SyncEngine(before=before, held=[])


@pytest.mark.parametrize("bad_chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("num_buffers", [1, 2, 8])
def test_a_failing_chunk_raises_where_waited_and_gives_every_buffer_back(
    swap_path: Path, bad_chunk: int, num_buffers: int
) -> None:
    with open_rig("nvme", swap_path, num_buffers=num_buffers, engine=failing_reads(bad_chunk)) as rig:
        home, data = fill(rig, "a", 5)
        with pytest.raises((TransferError, EngineFailedError), match="the disk failed"):
            rig.tier.fetch(home.slot, torch.zeros_like(data)).wait()
        assert rig.staging.num_free == num_buffers


def test_a_fetch_that_cannot_be_submitted_gives_every_buffer_back(swap_path: Path) -> None:
    """The engine has latched: the store refuses the request while the fetch already holds buffers."""
    with open_rig("nvme", swap_path, num_buffers=4, engine=failing_reads(1)) as rig:
        home, data = fill(rig, "a", 3)
        with pytest.raises((TransferError, EngineFailedError), match="the disk failed"):
            rig.tier.fetch(home.slot, torch.zeros_like(data)).wait()
        for _ in range(5):
            with pytest.raises(EngineFailedError, match="the disk failed"):
                rig.tier.fetch(home.slot, torch.zeros_like(data)).wait()
            assert rig.staging.num_free == 4


def test_a_failing_write_raises_where_waited(swap_path: Path) -> None:
    def before(kind: str, number: int) -> None:
        if kind == "write" and number == 2:
            raise OSError(errno.ENOSPC, "no space")

    with open_rig("nvme", swap_path, engine=SyncEngine(before=before, held=[])) as rig:
        slot = rig.tier.reserve("a", 2 * PAGE_NBYTES, "state")
        with rig.buffers.lease(PAGE_NBYTES) as lease:
            lease.tensor.zero_()
            rig.tier.write(slot, lease.tensor).wait()
            transfer = rig.tier.write(slot, lease.tensor, PAGE_NBYTES)
            with pytest.raises(TransferError, match="no space"):
                transfer.wait()
            assert transfer.done()


def test_chunks_with_free_buffers_are_read_before_the_lane_reaches_them(swap_path: Path) -> None:
    """Reads are on their way from the moment of the fetch, not from the moment of its turn."""
    engine = SyncEngine(held=[])
    with open_rig("nvme", swap_path, num_buffers=2, engine=engine) as rig:
        home, data = fill(rig, "a", 5)
        engine.operations.clear()
        gate = threading.Event()
        rig.runtime.accelerator.lane("fetch").submit(gate.wait)
        transfer = rig.tier.fetch(home.slot, out := torch.zeros_like(data))
        num_reads = sum(operation[0] == "read" for operation in engine.operations)
        gate.set()
        transfer.wait()
        assert num_reads == 2, "one for each free buffer"
        assert torch.equal(out, data)


@pytest.mark.parametrize("num_buffers", [1, 2])  # chunks are read from the lane too, and not only at once
def test_fetches_are_urgent_and_reads_of_state_are_not(swap_path: Path, num_buffers: int) -> None:
    engine = SyncEngine(held=[])
    with open_rig("nvme", swap_path, num_buffers=num_buffers, engine=engine) as rig:
        home, data = fill(rig, "a", 4)
        assert engine.held is not None
        engine.held.clear()
        rig.tier.fetch(home.slot, torch.zeros_like(data)).wait()
        with rig.buffers.lease(PAGE_NBYTES) as lease:
            rig.tier.read(home.slot, lease.tensor).wait()
            rig.tier.write(home.slot, lease.tensor).wait()
        kinds = [(transfer.request.kind, transfer.request.urgent) for transfer in engine.held]
        assert kinds == [("read", True)] * 4 + [("read", False), ("write", False)]


def receiving(rig: Rig, in_place: bool) -> tuple[UnitUpdate, Transfer, torch.Tensor, torch.Tensor]:
    """A fetch of four pages, while an update of them is under way and has made the second. `in_place`: the disk can
    write to where they are used.

    Returns what it publishes, the fetch, its target, and what that should hold in the end.
    """
    home, expected = fill(rig, "a", 4)
    target = torch.zeros_like(expected)
    if in_place:
        place = rig.runtime.accelerator.reserve_place(expected.numel(), expected.numel())
        assert place is not None
        place.fill()
        target = place.tensor
    unit_update = UnitUpdate()
    transfer = rig.tier.fetch(home.slot, target, unit_update)
    expected[PAGE_NBYTES : 2 * PAGE_NBYTES] = made = random_bytes(PAGE_NBYTES)
    unit_update.add_pending(PAGE_NBYTES, made)
    return unit_update, transfer, target, expected


@pytest.mark.parametrize("in_place", [True, False])
def test_what_an_update_hands_over_is_not_read(in_place: bool, swap_path: Path) -> None:
    kinds: list[str] = []
    engine = SyncEngine(before=lambda kind, number: kinds.append(kind))
    with open_rig("nvme", swap_path, engine=engine) as rig:
        unit_update, transfer, target, expected = receiving(rig, in_place)
        assert "read" not in kinds and not transfer.done()
        unit_update.complete()
        transfer.wait()
        assert torch.equal(target, expected)
        assert kinds.count("read") == (2 if in_place else 3), "before it and behind it, by buffers of a page"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("bad_read", [1, 2])
def test_a_failing_read_of_the_rest_raises_where_waited(swap_path: Path, bad_read: int, in_place: bool) -> None:
    with open_rig("nvme", swap_path, engine=failing_reads(bad_read)) as rig:
        unit_update, transfer, _, _ = receiving(rig, in_place)
        unit_update.complete()
        with pytest.raises((TransferError, EngineFailedError), match="the disk failed"):
            transfer.wait()


def test_a_committed_slot_takes_its_size_twice_and_its_tiers_commits(swap_path: Path) -> None:
    with open_rig("nvme", swap_path) as rig:
        slot = rig.tier.reserve("a", PAGE_NBYTES, "state", num_durable=2)
        assert slot.nbytes == PAGE_NBYTES and held_nbytes(rig.runtime.ledger, "nvme") == 2 * PAGE_NBYTES
        rig.tier.reserve("b", PAGE_NBYTES, "state", num_durable=2)
    assert held_nbytes(rig.runtime.ledger, "nvme") == 0


def test_a_slot_that_is_written_once_is_charged_twice_when_it_changes_after_a_commit(swap_path: Path) -> None:
    with open_rig("nvme", swap_path) as rig:
        slot = rig.tier.reserve("a", PAGE_NBYTES, "param", num_durable=1)
        with rig.buffers.lease(PAGE_NBYTES, "a") as lease:
            for value, num_places in ((1, 1), (1, 1), (2, 2)):
                lease.tensor.fill_(value)
                rig.tier.write(slot, lease.tensor).wait()
                assert held_nbytes(rig.runtime.ledger, "nvme") == num_places * PAGE_NBYTES
                rig.tier.store.commit(value, {})
    assert held_nbytes(rig.runtime.ledger, "nvme") == 0
