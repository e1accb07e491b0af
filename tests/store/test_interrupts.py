"""An interrupt at any line of a read or a write: nothing of the request stays in flight, and no byte is other."""

import gc
import linecache
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pytest

from tests.fakes.sync_io import SyncEngine
from tiered_zero.errors import EngineFailedError
from tiered_zero.io.engine import IOEngine, IOTransfer
from tiered_zero.io.select import select_engine
from tiered_zero.sizes import MIB
from tiered_zero.store.swap_dir import SwapDir
from tiered_zero.store.swap_store import SwapStore
from tiered_zero.store.transfers import Worker

NBYTES = 2 * MIB


def interrupted(act: Callable[[], object], at: int, error: type[BaseException] = KeyboardInterrupt) -> bool:
    """Whether `error` was raised ahead of the `at`-th line of the package on this thread (from 0).

    Lines of a `with` are left out: a tracing function is called for them again between a block and its end, where no
    signal is handled, and a lock would stay taken.
    """
    left = [at]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "/tiered_zero/" not in frame.f_code.co_filename:
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not text.lstrip().startswith("with "):
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise error
        return trace

    sys.settrace(trace)
    try:
        act()
    except error:
        return True
    finally:
        sys.settrace(None)
    return False


def memory(fill: int) -> memoryview:
    pages = mmap.mmap(-1, NBYTES)
    pages[:] = bytes([fill]) * NBYTES
    return memoryview(pages)


@pytest.fixture(params=["native", "sync"])
def engine(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[IOEngine]:
    chosen: IOEngine = SyncEngine() if request.param == "sync" else select_engine(swap_path, io_uring=False).engine
    yield chosen
    chosen.close()


def new_store(swap_path: Path, engine: IOEngine, num_paths: int = 2) -> SwapStore:
    parents = [swap_path / str(index) for index in range(num_paths)]
    for parent in parents:
        parent.mkdir(exist_ok=True)
    return SwapStore(SwapDir.create(parents), engine, capacity_nbytes=4 * NBYTES)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_read_leaves_nothing_in_flight(
    swap_path: Path, engine: IOEngine, error: type[BaseException]
) -> None:
    store = new_store(swap_path, engine)
    record = store.reserve("w", NBYTES)
    store.write(record, memory(1)).wait()
    into = memory(0)
    transfers: list[IOTransfer] = []
    at = 0
    while interrupted(lambda: transfers.append(store.read(record, into)), at, error):
        assert not store._table.in_flight(record), f"at line {at}"
        store.write(record, memory(at % 251)).wait()  # refused while a read is in flight
        store.read(record, into).wait()
        assert into == memory(at % 251)
        at += 1
    assert at > 30
    transfers[0].wait()
    store.close()


def test_an_interrupted_write_is_whole_or_undone_or_latches(swap_path: Path, engine: IOEngine) -> None:
    at, outcomes = 0, set()
    while True:
        store = new_store(swap_path, engine)
        record = store.reserve("w", NBYTES)
        store.write(record, memory(1)).wait()
        if not interrupted(lambda: store.write(record, memory(2)), at):  # noqa: B023
            break
        into = memory(0)
        try:
            assert not store._table.in_flight(record), f"at line {at}"
            store.read(record, into).wait()
            outcomes.add(into[0])
            assert into in (memory(1), memory(2))
            store.write(record, memory(3)).wait()
        except EngineFailedError:
            outcomes.add("latched")
        store.close()
        at += 1
    assert at > 40 and {1, 2, "latched"} == outcomes
    store.close()


def test_a_failure_before_the_transfer_leaves_nothing_in_flight(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(swap_path, SyncEngine(), num_paths=1)
    record = store.reserve("w", NBYTES)
    store.write(record, memory(1)).wait()

    def fail(*_: object) -> None:
        raise MemoryError

    for act in (lambda: store.write(record, memory(2)), lambda: store.read(record, memory(0))):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(store, "_start", fail)
            act()
        store.write(record, memory(2)).wait()
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
