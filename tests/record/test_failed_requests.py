"""A read or a write that fails before its transfer is there: nothing of the request stays in flight."""

import gc
import mmap
import threading
from pathlib import Path
from threading import Event

import pytest

from tests.fakes.sync_io import SyncEngine, SyncTransfer
from tiered_zero.concurrency.transfer import Worker
from tiered_zero.errors import StoreError
from tiered_zero.io.engine import IOEngine
from tiered_zero.record.directory import SwapDir
from tiered_zero.record.store import SwapStore
from tiered_zero.sizes import MIB

NBYTES = 2 * MIB


def memory(fill: int) -> memoryview:
    pages = mmap.mmap(-1, NBYTES)
    pages[:] = bytes([fill]) * NBYTES
    return memoryview(pages)


def new_store(swap_path: Path, engine: IOEngine, num_paths: int = 2) -> SwapStore:
    parents = [swap_path / str(index) for index in range(num_paths)]
    for parent in parents:
        parent.mkdir(exist_ok=True)
    return SwapStore(SwapDir.create(parents), engine, capacity_nbytes=4 * NBYTES)


def test_a_request_that_the_engine_refuses_leaves_nothing_in_flight(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SyncEngine()
    store = new_store(swap_path, engine, num_paths=1)
    record = store.reserve("w", NBYTES)
    store.write(record, memory(1)).wait()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    for act in (lambda: store.write(record, memory(2)), lambda: store.read(record, memory(0))):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(engine, "write", fail)
            patch.setattr(engine, "read", fail)
            act()
        store.write(record, memory(2)).wait()
    store.close()


def test_a_write_whose_wait_was_interrupted_stays_in_flight_until_it_ends(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, waits, gate = SyncEngine(), Event(), Event()
    store = new_store(swap_path, engine, num_paths=1)
    other, record = store.reserve("other", NBYTES), store.reserve("w", NBYTES)
    store.write(record, memory(1)).wait()

    def hold(*_: object) -> None:
        waits.set()
        gate.wait(60)

    engine.held, engine.before = [], hold
    store.write(other, memory(3))
    assert waits.wait(60), "the store's thread waits for it"
    write = store.write(record, memory(2))

    def interrupt(_: SyncTransfer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SyncTransfer, "wait", interrupt)
        write.wait()
    with pytest.raises(StoreError, match="still in flight"):
        store.read(record, memory(0))
    gate.set()
    write.wait()
    found = memory(0)
    store.read(record, found).wait()
    assert found == memory(2)
    store.close()


def test_the_thread_of_a_worker_that_was_not_closed_ends_with_it() -> None:
    """As where an interrupt comes between the request of a close and the close itself."""
    worker, ran = Worker("unclosed"), Event()
    worker.submit(ran.set)
    assert ran.wait(60)
    thread = next(thread for thread in threading.enumerate() if thread.name == "unclosed")
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
