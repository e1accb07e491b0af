"""Records that are appended to a file come back verified, through a few buffers, in whatever order they are wanted."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from tests.fakes.sync_io import SyncEngine
from tests.support.tags import in_pages, moved_by
from tiered_zero.concurrency.transfer import wait_all
from tiered_zero.errors import CorruptionError, InternalError, StoreError, TransferError
from tiered_zero.record.data_files import BUFFER_NBYTES, NUM_BUFFERS, RecordFiles, RecordReader, RecordWriter, Wanted
from tiered_zero.record.manifest import Contents, Range, Record
from tiered_zero.sizes import MIB, PAGE_NBYTES

SIZES = {"small": 5 * PAGE_NBYTES, "large": 30 * MIB + PAGE_NBYTES, "odd": 3 * MIB - PAGE_NBYTES, "last": PAGE_NBYTES}


def write(path: Path, records: dict[str, list[bytes]]) -> Contents:
    """Each record in one or more parts."""
    writer = RecordWriter(path)
    transfers = [writer.append(name, in_pages(part)) for name, parts in records.items() for part in parts]
    wait_all(transfers)
    contents = writer.finish()
    writer.wait_durable()
    return contents


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordFiles, dict[str, bytes]]:
    path = tmp_path_factory.mktemp("records") / "data.bin"
    data = {name: os.urandom(nbytes) for name, nbytes in SIZES.items()}
    parts = {
        name: [own[:PAGE_NBYTES], own[PAGE_NBYTES:]] if len(own) > PAGE_NBYTES else [own] for name, own in data.items()
    }
    return RecordFiles(paths=[path], contents=write(path, parts)), data


class Into:
    """Memory that a range of a record is read to."""

    def __init__(self, name: str, start: int, stop: int) -> None:
        self.found = bytearray(stop - start)
        self.num_taken = 0
        self.wanted = Wanted(0, name, start, stop, self.take)

    def take(self, at: int, memory: memoryview) -> None:
        self.found[at : at + len(memory)] = memory
        self.num_taken += len(memory)


def test_what_is_appended_is_described(saved: tuple[RecordFiles, dict[str, bytes]]) -> None:
    contents, data = saved[0].contents, saved[1]
    assert contents.capacity_nbytes == sum(SIZES.values()) == saved[0].paths[0].stat().st_size
    assert {record.name: record.nbytes for record in contents.records} == SIZES
    assert saved[0].paths[0].read_bytes() == b"".join(data.values())
    assert all(item.end - item.start <= MIB for items in contents.ranges.values() for item in items)
    assert saved[0].paths[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("seed", range(5))
def test_any_ranges_come_back_in_any_order(saved: tuple[RecordFiles, dict[str, bytes]], seed: int) -> None:
    """Several readings at a time, some of which share windows, and windows that were read before."""
    random = Random(seed)
    reader = RecordReader([saved[0]])
    readings = []
    for _ in range(12):
        own = []
        for _ in range(random.randint(0, 4)):
            name = random.choice([*SIZES])
            start, stop = sorted(random.sample(range(SIZES[name] + 1), 2))
            own.append(Into(name, start, stop))
        readings.append((reader.submit([one.wanted for one in own]), own))
        if random.random() < 0.4:
            reader.wait(readings[random.randrange(len(readings))][0])
    for reading, own in readings:
        reader.wait(reading)
        for one in own:
            assert one.num_taken == len(one.found), "each byte is taken once"
            assert one.found == saved[1][one.wanted.name][one.wanted.start : one.wanted.stop]
    reader.close()
    reader.close()


def test_a_whole_record_is_read_once_in_order_and_ahead(saved: tuple[RecordFiles, dict[str, bytes]]) -> None:
    engine = SyncEngine()
    reader = RecordReader([saved[0]])
    into = Into("large", 0, SIZES["large"])
    with moved_by(engine):
        reading = reader.submit([into.wanted])
    reads = [operation[2:] for operation in engine.operations if operation[0] == "read"]
    assert len(reads) == NUM_BUFFERS, "as many as there are buffers, before anything is waited for"
    reader.wait(reading)
    reads = [operation[2:] for operation in engine.operations if operation[0] == "read"]
    offsets = [offset for offset, _ in reads]
    assert offsets == sorted(offsets) and sum(nbytes for _, nbytes in reads) == SIZES["large"]
    assert all(nbytes <= BUFFER_NBYTES for _, nbytes in reads)
    again = Into("large", SIZES["large"] - 100, SIZES["large"])
    reader.wait(reader.submit([again.wanted]))
    assert len([1 for operation in engine.operations if operation[0] == "read"]) == len(reads), "it is still there"
    assert again.found == saved[1]["large"][-100:]
    reader.close()


def test_a_changed_byte_is_not_handed_out(tmp_path: Path) -> None:
    data = os.urandom(2 * MIB)
    contents = write(tmp_path / "data.bin", {"a": [data]})
    with open(tmp_path / "data.bin", "r+b") as file:
        file.seek(MIB + 7)
        file.write(bytes([data[MIB + 7] ^ 1]))
    reader = RecordReader([RecordFiles(paths=[tmp_path / "data.bin"], contents=contents)])
    into = Into("a", 0, 2 * MIB)
    with pytest.raises(CorruptionError, match=rf"a: {MIB} bytes at offset {MIB} of .*data.bin are not those"):
        reader.wait(reader.submit([into.wanted]))
    assert into.num_taken == 0
    (broken,) = reader.damage()
    assert broken.startswith(f"a: {MIB} bytes at offset {MIB} of ")
    reader.close()


def test_what_was_never_written_is_not_read(tmp_path: Path) -> None:
    contents = write(tmp_path / "data.bin", {"a": [os.urandom(MIB)]})
    record = Record(name="a", nbytes=2 * MIB, committed=True, offsets=(0,))
    halves = Contents(capacity_nbytes=2 * MIB, weights=(1.0,), records=(record,), ranges=contents.ranges)
    reader = RecordReader([RecordFiles(paths=[tmp_path / "data.bin"], contents=halves)])
    with pytest.raises(StoreError, match="does not have the bytes"):
        reader.submit([Into("a", MIB - 1, MIB + 1).wanted])
    assert reader.extents == {(0, "a"): 2 * MIB}
    huge = Contents(
        capacity_nbytes=4 * MIB,
        weights=(1.0,),
        records=(Record(name="a", nbytes=4 * MIB, committed=True, offsets=(0,)),),
        ranges={"a": [Range(0, 4 * MIB, 0, 1)]},
    )
    with pytest.raises(StoreError, match="have one checksum; expected at most 2 MiB"):
        RecordReader([RecordFiles(paths=[tmp_path / "data.bin"], contents=huge)]).submit([Into("a", 0, 1).wanted])


def test_a_failed_write_is_raised_and_nothing_is_in_use(tmp_path: Path) -> None:
    def fail(kind: str, number: int) -> None:
        if kind == "write" and number == 2:
            raise OSError(5, "Input/output error")

    writer = RecordWriter(tmp_path / "data.bin")
    with moved_by(SyncEngine(before=fail)):
        writer.append("a", in_pages(bytes(PAGE_NBYTES))).wait()
    with pytest.raises(TransferError):
        writer.append("b", in_pages(bytes(PAGE_NBYTES))).wait()
    with pytest.raises(TransferError):
        writer.finish()
    writer.close()
    writer.close()


def test_only_whole_pages_of_the_last_record_are_appended(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "data.bin")
    memory = in_pages(bytes(2 * PAGE_NBYTES))
    for wrong in (memory[:100], memory[:0], memory[8 : PAGE_NBYTES + 8]):
        with pytest.raises(InternalError, match="whole pages"):
            writer.append("a", wrong)
    for name in ("a", "a", "b"):
        writer.append(name, memory[:PAGE_NBYTES])
    with pytest.raises(InternalError, match="another one lies behind it"):
        writer.append("a", memory[:PAGE_NBYTES])
    assert [record.offsets[0] for record in writer.finish().records] == [0, 2 * PAGE_NBYTES]
    writer.wait_durable()


def test_nothing_to_write_makes_no_file(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "data.bin")
    contents = writer.finish()
    writer.wait_durable()
    assert contents.capacity_nbytes == 0 and list(tmp_path.iterdir()) == []
    reader = RecordReader([RecordFiles(paths=[tmp_path / "data.bin"], contents=contents)])
    reader.wait(reader.submit([]))
    assert reader.damage() == []
