"""Records, checked transfers, misuse, latching, capacity, stripes: over a synchronous engine and the real ones."""

import errno
import mmap
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection import free_nbytes
from tiered_zero.errors import CorruptionError, EngineFailedError, StoreError, TransferError
from tiered_zero.io.engine import IOEngine
from tiered_zero.io.select import select_engine
from tiered_zero.record.data_files import DATA_NAME
from tiered_zero.record.directory import SwapDir
from tiered_zero.record.manifest import CHUNK_NBYTES, load
from tiered_zero.record.store import SwapStore
from tiered_zero.sizes import MIB

PAGE = 4096


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def pattern(nbytes: int, seed: int = 1) -> memoryview:
    return aligned(bytes((i * 37 + seed + i // PAGE) & 255 for i in range(PAGE)) * (nbytes // PAGE))


@pytest.fixture
def engine() -> SyncEngine:
    return SyncEngine()


@pytest.fixture
def make(swap_path: Path, engine: SyncEngine) -> Iterator[Callable[..., SwapStore]]:
    stores: list[SwapStore] = []

    def build(capacity_nbytes: int = 16 * MIB, engine: IOEngine = engine, **options: object) -> SwapStore:
        store = SwapStore(SwapDir.create([swap_path]), engine, capacity_nbytes=capacity_nbytes, **options)
        stores.append(store)
        return store

    yield build
    for store in stores:
        store.close()
    assert list(swap_path.iterdir()) == []


def read(store: SwapStore, name: str, nbytes: int | None = None, offset: int = 0) -> memoryview:
    record = store.records()[name]
    into = aligned(bytes(nbytes or record.extent_nbytes))
    store.read(record, into, offset).wait()
    return into


def data_file(swap_path: Path) -> Path:
    (path,) = swap_path.glob(f"*/{DATA_NAME}")
    return path


@pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097, 3 * MIB + 5])
@pytest.mark.parametrize("name", ["sync", "auto", "aiofiles"])
def test_what_was_written_is_read_back(
    make: Callable[..., SwapStore], swap_path: Path, name: str, nbytes: int, engine: SyncEngine
) -> None:
    chosen: IOEngine = engine if name == "sync" else select_engine(swap_path, prefer=name).engine
    store = make(engine=chosen)
    record = store.reserve("master/a", nbytes)
    store.reserve("master/b", 10)
    data = pattern(record.extent_nbytes)
    store.write(record, data).wait()
    assert read(store, "master/a") == data
    assert store.nbytes("write") == {"master": record.extent_nbytes} == store.nbytes("read")
    assert store.nbytes("unverified") == {"master": 0}
    store.close()
    chosen.close()


def test_disk_use_is_the_capacity_to_the_byte_and_private(make: Callable[..., SwapStore], swap_path: Path) -> None:
    make(capacity_nbytes=5 * MIB + 1)
    status = data_file(swap_path).stat()
    assert status.st_size == 5 * MIB + PAGE == status.st_blocks * 512
    assert status.st_mode & 0o777 == 0o600
    assert data_file(swap_path).parent.stat().st_mode & 0o777 == 0o700


def test_over_capacity_names_wanted_and_left(make: Callable[..., SwapStore]) -> None:
    store = make(capacity_nbytes=8 * PAGE)
    store.reserve("a", 6 * PAGE)
    with pytest.raises(StoreError, match=r"12288 bytes.*free \(8192 bytes\)"):
        store.reserve("b", 2 * PAGE + 1)
    with pytest.raises(StoreError):
        store.reserve("c", PAGE + 1, committed=True)
    assert free_nbytes(store) == 2 * PAGE, "the first slot of a refused record stayed taken"
    with pytest.raises(StoreError, match="already"):
        store.reserve("a", 1)
    assert store.reserve("b", 2 * PAGE).offsets == (6 * PAGE,)


def test_a_flipped_bit_is_found_before_use(make: Callable[..., SwapStore], swap_path: Path) -> None:
    store = make()
    store.reserve("first", PAGE)
    record = store.reserve("state/w", 3 * MIB)
    store.write(record, pattern(3 * MIB)).wait()
    at = record.offsets[0] + MIB + 77
    with open(data_file(swap_path), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    transfer = store.read(record, aligned(bytes(3 * MIB)))
    for _ in range(2):
        with pytest.raises(
            CorruptionError, match=rf"'state/w'.* read from {data_file(swap_path)} at offset {PAGE + MIB}"
        ):
            transfer.wait()
    assert store.nbytes("read") == {}
    assert read(store, "state/w", MIB) == pattern(3 * MIB)[:MIB], "a sound chunk stays readable"


def test_never_written_bytes_cannot_be_read(make: Callable[..., SwapStore]) -> None:
    store = make()
    record = store.reserve("a", 4 * PAGE)
    store.write(record, pattern(PAGE), PAGE).wait()
    for offset, nbytes in ((0, PAGE), (0, 4 * PAGE), (PAGE, 2 * PAGE)):
        with pytest.raises(StoreError, match="never written"):
            store.read(record, aligned(bytes(nbytes)), offset)
    assert read(store, "a", PAGE, PAGE) == pattern(PAGE)


def test_partial_rewrite_is_read_right_and_counted_as_unverified(make: Callable[..., SwapStore]) -> None:
    store = make()
    record = store.reserve("a", 2 * MIB)
    store.write(record, pattern(2 * MIB)).wait()
    store.write(record, pattern(2 * PAGE, seed=9), MIB - PAGE).wait()
    expected = bytearray(pattern(2 * MIB))
    expected[MIB - PAGE : MIB + PAGE] = pattern(2 * PAGE, seed=9)
    assert read(store, "a") == expected
    assert store.nbytes("unverified") == {"a": 2 * MIB - 2 * PAGE}
    store.write(record, aligned(bytes(expected))).wait()
    assert read(store, "a") == expected
    assert store.nbytes("unverified") == {"a": 2 * MIB - 2 * PAGE}, "a whole rewrite is verified whole again"


@pytest.mark.parametrize(("mode", "verified"), [("all", 32), ("off", 0)])
def test_checksum_modes_cover_what_they_say(make: Callable[..., SwapStore], mode: str, verified: int) -> None:
    store = make(capacity_nbytes=32 * MIB, checksums=mode)
    record = store.reserve("a", 32 * MIB)
    store.write(record, pattern(32 * MIB)).wait()
    read(store, "a")
    assert store.nbytes("unverified") == {"a": (32 - verified) * CHUNK_NBYTES}


def test_overlap_with_a_request_in_flight_is_refused(make: Callable[..., SwapStore], engine: SyncEngine) -> None:
    store = make()
    record = store.reserve("a", 4 * PAGE)
    store.write(record, pattern(4 * PAGE)).wait()
    gate = Gate(engine)
    store.write(record, pattern(2 * PAGE))
    with pytest.raises(StoreError, match="in flight"):
        store.read(record, aligned(bytes(PAGE)), PAGE)
    with pytest.raises(StoreError, match="in flight"):
        store.write(record, pattern(PAGE))
    reading = [store.read(record, aligned(bytes(PAGE)), 2 * PAGE) for _ in range(2)]
    with pytest.raises(StoreError, match="in flight"):
        store.write(record, pattern(PAGE), 2 * PAGE)
    gate.open()
    for transfer in reading:
        transfer.wait()


class Gate:
    """Holds every request of a SyncEngine back until `open`."""

    def __init__(self, engine: SyncEngine) -> None:
        self._event = threading.Event()
        engine.held = []
        engine.before = lambda kind, n: self._event.wait(300) and None

    def open(self) -> None:
        self._event.set()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(1, PAGE), (0, 100), (0, 5 * PAGE), (4 * PAGE, PAGE), (-PAGE, PAGE), (0, 0)]
)
def test_requests_outside_or_unaligned_are_refused(make: Callable[..., SwapStore], offset: int, nbytes: int) -> None:
    store = make()
    record = store.reserve("a", 4 * PAGE)
    with pytest.raises(StoreError, match="whole pages"):
        store.write(record, memoryview(bytearray(nbytes)), offset)


def test_a_failed_write_raises_and_latches(make: Callable[..., SwapStore], engine: SyncEngine) -> None:
    store = make()
    record = store.reserve("a", PAGE)
    store.write(record, pattern(PAGE)).wait()

    def fail(kind: str, n: int) -> None:
        raise OSError(errno.EIO, "injected")

    engine.before = fail
    transfer = store.write(record, pattern(PAGE, seed=2))
    with pytest.raises(TransferError, match="injected"):
        transfer.wait()
    engine.before = lambda kind, n: None
    for act in (
        lambda: store.read(record, aligned(bytes(PAGE))),
        lambda: store.write(record, pattern(PAGE)),
        lambda: store.commit(1, {}),
    ):
        with pytest.raises(EngineFailedError, match="injected"):
            act()
    assert store.nbytes("write") == {"a": PAGE}


def test_transfers_without_a_wait_are_finalized(make: Callable[..., SwapStore], engine: SyncEngine) -> None:
    store = make()
    record = store.reserve("a", PAGE)
    store.write(record, pattern(PAGE))
    deadline_s = time.monotonic() + 300
    while store.nbytes("write") != {"a": PAGE} and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert store.nbytes("write") == {"a": PAGE}

    def fail(kind: str, n: int) -> None:
        raise OSError(errno.EIO, "injected")

    engine.before = fail
    transfer = store.write(record, pattern(PAGE))
    while not transfer.done() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    with pytest.raises(EngineFailedError, match="injected"):
        store.write(record, pattern(PAGE))


def test_a_failed_fsync_latches_and_is_not_retried(make: Callable[..., SwapStore], engine: SyncEngine) -> None:
    store = make()
    record = store.reserve("a", PAGE, committed=True)
    store.write(record, pattern(PAGE)).wait()

    def fail(kind: str, n: int) -> None:
        if kind == "sync":
            raise OSError(errno.EIO, "injected")

    engine.before = fail
    with pytest.raises(TransferError, match="injected"):
        store.commit(1, {})
    with pytest.raises(EngineFailedError, match="the last checkpoint"):
        store.commit(1, {})
    assert sum(operation[0] == "sync" for operation in engine.operations) == 1
    store.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [(errno.ENOSPC, "No space left.* Free space"), (errno.EFBIG, r"File too large\)\)\. .*ulimit -f.*larger files\.$")],
)
def test_a_full_disk_is_one_error_at_start_and_leaves_nothing(
    swap_path: Path, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch, code: int, expected: str
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=rf"needs 64\.0 MiB.*free there.*{expected}") as caught:
        SwapStore(SwapDir.create([swap_path]), engine, capacity_nbytes=64 * MIB)
    assert "All ranks" not in str(caught.value), "it is the only rank"
    assert list(swap_path.iterdir()) == []


def test_stripes_use_both_paths_by_weight_and_lose_nothing(swap_path: Path, engine: SyncEngine) -> None:
    parents = [swap_path / "a", swap_path / "b"]
    for parent in parents:
        parent.mkdir()
    directory = SwapDir.create(parents)
    store = SwapStore(directory, engine, capacity_nbytes=600 * MIB, weights=[3.0, 1.0])
    sizes = [(path / DATA_NAME).stat().st_size for path in directory.paths]
    assert sum(sizes) == 600 * MIB
    assert abs(sizes[0] / sum(sizes) - 0.75) < 0.05
    record = store.reserve("a", 20 * MIB + PAGE, committed=True)
    data = pattern(record.extent_nbytes)
    store.write(record, data).wait()
    assert len({operation[1] for operation in engine.operations if operation[0] == "write"}) == 2
    assert read(store, "a") == data
    store.commit(3, {"loss": 1.5})
    store.close(remove=False)
    again = SwapStore.recover(SwapDir.open(directory.paths[1]), engine)
    committed, _ = load(directory.paths[0])
    assert committed is not None and (again.step, committed.metadata) == (3, {"loss": 1.5})
    assert read(again, "a") == data
    again.close(remove=False)
    (directory.paths[1] / DATA_NAME).unlink()
    with pytest.raises(StoreError, match=rf"{directory.paths[1]}.* is missing"):
        SwapStore.recover(SwapDir.open(directory.paths[0]), engine)


def test_a_prepared_state_rests(make: Callable[..., SwapStore]) -> None:
    store = make(capacity_nbytes=6 * PAGE)
    a = store.reserve("a", PAGE, committed=True)
    scratch = store.reserve("s", PAGE)
    store.write(a, pattern(PAGE)).wait()
    store.prepare(1, {})
    for act in (lambda: store.write(a, pattern(PAGE)), lambda: store.prepare(2, {})):
        with pytest.raises(StoreError, match="is prepared"):
            act()
    store.write(scratch, pattern(PAGE)).wait()
    store.confirm()
    with pytest.raises(StoreError, match="Nothing is prepared"):
        store.confirm()
    store.write(a, pattern(PAGE, seed=2)).wait()
    assert read(store, "a") == pattern(PAGE, seed=2)


def test_revert_returns_to_the_last_commit(make: Callable[..., SwapStore], swap_path: Path) -> None:
    store = make(capacity_nbytes=16 * PAGE)
    a, b = (store.reserve(name, 2 * PAGE, committed=True) for name in "ab")
    scratch = store.reserve("s", PAGE)
    for record in (a, b):
        store.write(record, pattern(2 * PAGE)).wait()
    store.commit(1, {})
    store.write(a, pattern(PAGE, seed=2), PAGE).wait()
    store.write(scratch, pattern(PAGE, seed=3)).wait()
    newer = store.reserve("c", PAGE, committed=True)
    store.write(newer, pattern(PAGE)).wait()
    store.revert()
    assert read(store, "a") == read(store, "b") == pattern(2 * PAGE)
    assert read(store, "s") == pattern(PAGE, seed=3), "scratch records have no commit"
    with pytest.raises(StoreError, match="never written"):
        store.read(newer, aligned(bytes(PAGE)))
    store.write(a, pattern(2 * PAGE, seed=4)).wait()
    store.commit(2, {})
    store.close(remove=False)
    (path,) = swap_path.iterdir()
    again = SwapStore.recover(SwapDir.open(path), SyncEngine())
    assert read(again, "a") == pattern(2 * PAGE, seed=4) and read(again, "b") == pattern(2 * PAGE)
    again.close()


def test_revert_waits_for_the_confirmation(make: Callable[..., SwapStore]) -> None:
    store = make()
    record = store.reserve("a", PAGE, committed=True)
    store.write(record, pattern(PAGE)).wait()
    store.prepare(1, {})
    with pytest.raises(StoreError, match="is prepared"):
        store.revert()
    store.confirm()
    store.revert()
    assert read(store, "a") == pattern(PAGE)


def test_commit_does_not_wait_for_writes(make: Callable[..., SwapStore], engine: SyncEngine) -> None:
    store = make()
    record = store.reserve("a", PAGE, committed=True)
    gate = Gate(engine)
    transfer = store.write(record, pattern(PAGE))
    with pytest.raises(StoreError, match="being written"):
        store.commit(1, {})
    gate.open()
    transfer.wait()
    store.commit(1, {})
    with pytest.raises(StoreError, match="must be JSON"):
        store.commit(2, {"x": object()})
    store.commit(3, {})


def test_a_directory_removed_in_mid_run_fails_the_commit(make: Callable[..., SwapStore], swap_path: Path) -> None:
    store = make()
    record = store.reserve("a", PAGE, committed=True)
    shutil.rmtree(data_file(swap_path).parent)
    store.write(record, pattern(PAGE)).wait()
    assert read(store, "a") == pattern(PAGE), "the open file still serves"
    with pytest.raises(StoreError, match="cannot be written"):
        store.commit(1, {})
    with pytest.raises(EngineFailedError, match="No such file"):
        store.read(record, aligned(bytes(PAGE)))


def test_a_full_descriptor_table_passes(make: Callable[..., SwapStore]) -> None:
    store = make()
    record = store.reserve("a", PAGE, committed=True)
    store.write(record, pattern(PAGE)).wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreError, match=r"Too many open files.*commit again"):
            store.commit(1, {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store.commit(1, {})
    assert store.step == 1


def test_recover_names_what_is_missing_or_cut_off(swap_path: Path, engine: SyncEngine) -> None:
    directory = SwapDir.create([swap_path])
    store = SwapStore(directory, engine, capacity_nbytes=MIB)
    store.commit(4, {})
    store.close(remove=False)
    path = directory.paths[0]
    with pytest.raises(StoreError, match=r"does not hold the state of step 3; it has the steps \[4\]"):
        SwapStore.recover(SwapDir.open(path), engine, step=3)
    os.truncate(path / DATA_NAME, MIB - PAGE)
    with pytest.raises(StoreError, match=f"is cut off at {MIB - PAGE} bytes"):
        SwapStore.recover(SwapDir.open(path), engine)
    (path / "manifest").unlink()
    with pytest.raises(StoreError, match=r"does not hold a committed state; it has the steps \[\]"):
        SwapStore.recover(SwapDir.open(path), engine)


def test_ten_thousand_names_of_any_length(make: Callable[..., SwapStore]) -> None:
    store = make(capacity_nbytes=10_000 * PAGE)
    for i in range(10_000):
        store.reserve(f"master/{'layer.' * 100}{i}", 100)
    assert free_nbytes(store) == 0


def test_close_twice_leaves_no_thread_and_no_file(swap_path: Path, engine: SyncEngine, no_leaks: None) -> None:
    for _ in range(5):
        store = SwapStore(SwapDir.create([swap_path]), engine, capacity_nbytes=MIB)
        store.close()
        store.close()
    assert list(swap_path.iterdir()) == []
