"""Committed records that are written once: one slot, until bytes that a commit holds are changed after all."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.fakes.sync_io import SyncEngine, SyncFile
from tests.support.file_systems import mounted
from tests.support.inspection.damage import store_damage
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.io.select import select_engine
from tiered_zero.record.data_files import DATA_NAME
from tiered_zero.record.directory import SwapDir
from tiered_zero.record.manifest import Record, load
from tiered_zero.record.store import SwapStore
from tiered_zero.sizes import MIB

PAGE = 4096
NBYTES = 2 * MIB + 3 * PAGE
"""Three pieces with a checksum each."""


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def values(seed: int) -> bytes:
    return bytes([seed]) * NBYTES


def read(store: SwapStore, record: Record) -> bytes:
    into = aligned(bytes(NBYTES))
    store.read(record, into).wait()
    return bytes(into)


def reopened(store: SwapStore, engine: SyncEngine) -> SwapStore:
    path = Path(store.paths[0])
    store.close(remove=False)
    return SwapStore.recover(SwapDir.open(path), engine)


def test_it_takes_its_bytes_once_and_the_second_slot_when_it_changes(swap_path: Path) -> None:
    engine = SyncEngine()
    store = SwapStore(SwapDir.create([swap_path]), engine, capacity_nbytes=NBYTES)
    record = store.reserve("a", NBYTES, committed=True, write_once=True)
    store.write(record, aligned(values(1))).wait()
    store.write(record, aligned(values(2))).wait()
    assert store.num_slots(record) == 1, "no commit holds it yet"
    store.commit(1, {})
    begun = len(engine.operations)
    store.write(record, aligned(values(2))).wait()
    store.write(record, aligned(values(2)[:PAGE] * 256), MIB).wait()
    assert engine.operations[begun:] == [] and store.num_slots(record) == 1, "the same bytes change nothing"
    store.write(record, aligned(bytes(PAGE)), MIB).wait()
    changed = values(2)[:MIB] + bytes(PAGE) + values(2)[MIB + PAGE :]
    assert read(store, record) == changed and store.num_slots(record) == 2
    assert store.capacity_nbytes == 2 * NBYTES == (Path(store.paths[0]) / DATA_NAME).stat().st_size

    store = reopened(store, engine)  # without a commit
    record = store.records()["a"]
    assert read(store, record) == values(2) and store.num_slots(record) == 1
    store.write(record, aligned(values(3))).wait()
    store.commit(2, {})
    store = reopened(store, engine)
    record = store.records()["a"]
    assert read(store, record) == values(3) and store.num_slots(record) == 2
    store.revert()
    store.commit(3, {})
    assert store_damage(store.paths) == []
    store.close()


def test_pieces_with_other_borders_are_not_taken_for_the_same(swap_path: Path) -> None:
    store = SwapStore(SwapDir.create([swap_path]), SyncEngine(), capacity_nbytes=NBYTES)
    record = store.reserve("a", NBYTES, committed=True, write_once=True)
    store.write(record, aligned(values(1))).wait()
    store.commit(1, {})
    store.write(record, aligned(values(1)[: 2 * PAGE]), PAGE).wait()
    assert store.num_slots(record) == 2 and read(store, record) == values(1)
    store.close()


def test_free_extents_are_taken_before_the_files_grow_on_every_path(swap_path: Path) -> None:
    parents = [swap_path / name for name in ("x", "y")]
    for parent in parents:
        parent.mkdir(mode=0o700)
    engine = SyncEngine()
    store = SwapStore(SwapDir.create(parents), engine, capacity_nbytes=3 * 8 * MIB)
    records = [store.reserve(name, 8 * MIB, committed=True, write_once=True) for name in "ab"]
    for step, record in enumerate(records, 1):
        store.write(record, aligned(bytes([step]) * 8 * MIB)).wait()
    store.commit(1, {})
    for capacity_nbytes, record in zip((24 * MIB, 32 * MIB), records, strict=True):
        store.write(record, aligned(bytes(8 * MIB))).wait()
        assert store.capacity_nbytes == capacity_nbytes
    assert [os.stat(Path(path) / DATA_NAME).st_size for path in store.paths] == [16 * MIB, 16 * MIB]
    store.commit(2, {})
    store = reopened(store, engine)
    assert store_damage(store.paths) == [] and store.capacity_nbytes == 32 * MIB
    store.close()


class NoMoreFile(SyncFile):
    def allocate(self, nbytes: int) -> None:
        if nbytes > NBYTES:
            raise OSError(28, "No space left on device")
        super().allocate(nbytes)


class NoMoreEngine(SyncEngine):
    def open(self, path: str, *, create: bool = False, writable: bool = True) -> SyncFile:
        return NoMoreFile(path, super().open(path, create=create, writable=writable).fd)


def check_full(store: SwapStore) -> None:
    record = store.reserve("a", NBYTES, committed=True, write_once=True)
    store.write(record, aligned(values(1))).wait()
    store.commit(1, {})
    with pytest.raises(StoreError, match=r"data\.bin must grow to 4\.0 MiB .* Free space there\."):
        store.write(record, aligned(values(2))).wait()
    assert read(store, record) == values(1) and store.num_slots(record) == 1
    store.commit(2, {})
    assert store_damage(store.paths) == []
    store.close()


def test_a_full_disk_leaves_it_as_it_was(swap_path: Path) -> None:
    check_full(SwapStore(SwapDir.create([swap_path]), NoMoreEngine(), capacity_nbytes=NBYTES))


def test_a_real_full_disk_leaves_it_as_it_was(swap_path: Path) -> None:
    with mounted("tmpfs", swap_path) as disk:
        engine = select_engine(disk).engine
        status = os.statvfs(disk)
        with (disk / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, status.f_bavail * status.f_frsize - NBYTES - 16 * PAGE)
        store = SwapStore(SwapDir.create([disk]), engine, capacity_nbytes=NBYTES)
        check_full(store)
        engine.close()


def test_what_a_write_has_left_of_a_range_gets_a_checksum(swap_path: Path) -> None:
    store = SwapStore(SwapDir.create([swap_path]), SyncEngine(), capacity_nbytes=4 * MIB)
    record = store.reserve("a", MIB, committed=True)
    path = Path(store.paths[0])
    store.write(record, aligned(values(1)[:MIB])).wait()
    store.write(record, aligned(values(2)[:PAGE]), PAGE).wait()
    store.commit(1, {})
    store.write(record, aligned(values(3)[:PAGE]), 8 * PAGE).wait()
    store.commit(2, {})
    committed, _ = load(path)
    assert committed is not None and all(item.digest is not None for item in committed.ranges["a"])
    assert store_damage([path]) == [] and sum(item.end - item.start for item in committed.ranges["a"]) == MIB
    store.close()


def test_what_a_write_has_left_of_a_damaged_range_is_not_committed(swap_path: Path) -> None:
    store = SwapStore(SwapDir.create([swap_path]), SyncEngine(), capacity_nbytes=4 * MIB)
    record = store.reserve("a", MIB, committed=True)
    store.write(record, aligned(values(1)[:MIB])).wait()
    store.commit(1, {})
    store.write(record, aligned(values(2)[:PAGE])).wait()
    with open(Path(store.paths[0]) / DATA_NAME, "r+b") as file:
        file.seek(record.offsets[0] + 3 * PAGE)
        file.write(b"rot")
    with pytest.raises(CorruptionError, match="bytes 0 to 1048576 are not those written"):
        store.commit(2, {})
    assert store.step == 1
    store.close()
