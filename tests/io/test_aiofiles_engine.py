"""What only the engine `aiofiles` shows, over faked system calls: its pieces, its order, its watchdog."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.io.conftest import pages
from tiered_zero.errors import TransferError
from tiered_zero.io import aiofile as pieces_module
from tiered_zero.io import engine as shared
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import IOSettings

Build = Callable[..., AiofilesEngine]


@pytest.fixture
def build() -> Iterator[Build]:
    built: list[AiofilesEngine] = []

    def build(queue_depth: int = 2, io_timeout_s: float = 120.0) -> AiofilesEngine:
        settings = IOSettings(block_size=4096, queue_depth=queue_depth)
        built.append(AiofilesEngine(direct=False, settings=settings, io_timeout_s=io_timeout_s))
        return built[-1]

    yield build
    for engine in built:
        engine.close()


def test_large_requests_take_few_calls_and_small_ones_one_each(
    build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = os.pwritev

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        sizes.append(len(views[0]))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    engine = build()
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 0, pages(4096 * 64)).wait()
    assert sizes == [4096 * 4] * 16
    sizes.clear()
    for transfer in [engine.write(file, 0, pages(4096 * 2)) for _ in range(5)]:
        transfer.wait()
    assert sizes == [4096] * 10
    file.close()


def test_the_queue_does_not_drain_between_requests(
    build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests of one block each, to two files, are in system calls all at once."""
    meeting = threading.Barrier(4)
    real = os.pwritev

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        meeting.wait(300)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    engine = build(queue_depth=4)
    files = [engine.open(str(swap_path / name), create=True) for name in "ab"]
    for transfer in [engine.write(file, offset, pages(4096)) for file in files for offset in (0, 4096)]:
        transfer.wait()
    for file in files:
        file.close()


def test_urgent_reads_are_taken_before_all_that_no_worker_has(
    build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    gate = threading.Event()
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset // 4096)
        gate.wait(300)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    path = swap_path / "data"
    path.write_bytes(bytes(32 * 4096))
    engine = build(queue_depth=1)
    file = engine.open(str(path))
    transfers = [engine.read(file, 0, pages(8 * 4096)), engine.read(file, 16 * 4096, pages(4096))]
    while not offsets:
        time.sleep(0.001)
    transfers += [engine.read(file, number * 4096, pages(2 * 4096), urgent=True) for number in (20, 22)]
    transfers.append(engine.read(file, 24 * 4096, pages(4096)))
    while len(engine._urgent) < 4 or len(engine._others) < 3:  # the loop has taken every request
        time.sleep(0.001)
    gate.set()
    for transfer in transfers:
        transfer.wait()
    assert offsets == [0, 20, 21, 22, 23, 4, 16, 24]
    file.close()


def test_after_a_failure_the_rest_of_a_request_is_not_tried(
    build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr(os, "pwritev", pwritev)
    engine = build(queue_depth=1)
    file = engine.open(str(swap_path / "data"), create=True)
    with pytest.raises(TransferError, match=r"ENOSPC .*free there\. Free space"):
        engine.write(file, 0, pages(1 << 20)).wait()
    assert offsets == [0]
    file.close()


def test_buffered_pages_are_dropped_from_the_cache(
    build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, nbytes, what: advice.append((offset, nbytes, what)))
    engine = build()
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 4096, pages(4096)).wait()
    engine.read(file, 4096, pages(4096)).wait()
    engine.sync(file).wait()
    assert advice == [(4096, 4096, os.POSIX_FADV_DONTNEED)] * 2 + [(0, 0, os.POSIX_FADV_DONTNEED)]
    file.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While clear, every read is stuck in its system call."""
    gate = threading.Event()
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        gate.wait(300)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return gate


def test_a_stall_is_raised_with_the_table_and_latches(build: Build, swap_path: Path, gate: threading.Event) -> None:
    engine = build(io_timeout_s=0.2)
    path = swap_path / "data"
    path.write_bytes(bytes(8192))
    file = engine.open(str(path))
    stuck, queued = engine.read(file, 0, pages(8192)), engine.read(file, 4096, pages(4096))
    begun_s = time.monotonic()
    with pytest.raises(TransferError, match=r"made no progress for 0\.2 s") as caught:
        stuck.wait()
    assert time.monotonic() - begun_s >= 0.2
    text = str(caught.value)
    assert "2 requests in flight" in text and f"4096 bytes at 4096           {path}" in text
    with pytest.raises(TransferError, match="made no progress"):
        engine.read(file, 0, pages(4096))
    assert not queued.done() and len(engine.in_flight()) == 2
    fd = file.fd
    file.close()
    os.fstat(fd)  # still open: a late transfer must not land in another file
    gate.set()
    engine.io_timeout_s = 60.0
    stuck.wait()  # it came in the end; the latch stays
    with pytest.raises(TransferError, match="made no progress"):
        engine.latch.check()


def test_a_slow_disk_is_no_stall(build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, now_s = os.preadv, [1.0]

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        now_s[0] += 0.5
        time.sleep(0.01)  # the one that waits looks at the clock
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    for module in (shared, pieces_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    path = swap_path / "data"
    path.write_bytes(bytes(4096 * 64))
    engine = build(queue_depth=1, io_timeout_s=0.75)
    file = engine.open(str(path))
    transfers = [engine.read(file, 0, pages(4096)) for _ in range(16)]
    transfers[-1].wait()  # 8 s in all, but a read ended every 0.5 s
    file.close()


def test_a_process_that_was_stopped_is_no_stall(
    build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """As by Ctrl-Z: the clock goes on, and neither the workers nor what waits for them does."""
    times_s = iter([1.0, *[1000.0] * 8])

    def monotonic() -> float:
        now_s = next(times_s, None)
        if now_s is None:
            gate.set()
        return now_s or 1000.0

    for module in (shared, pieces_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1.0))
    path = swap_path / "data"
    path.write_bytes(bytes(4096))
    engine = build(queue_depth=1, io_timeout_s=60.0)
    file = engine.open(str(path))
    transfer = engine.read(file, 0, pages(4096))
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=monotonic))
    transfer.wait()
    assert gate.is_set()
    file.close()


@pytest.mark.usefixtures("no_leaks")
def test_after_a_stall_closing_does_not_wait(build: Build, swap_path: Path, gate: threading.Event) -> None:
    engine = build(io_timeout_s=0.3)
    path = swap_path / "data"
    path.write_bytes(bytes(4096))
    file = engine.open(str(path))
    with pytest.raises(TransferError):
        engine.read(file, 0, pages(4096)).wait()
    engine.close()
    assert not gate.is_set(), "closed while the read is stuck: the gate opens on its own after 300 s"
    assert engine.in_flight()
    gate.set()
    file._descriptor.close()


def test_a_worker_survives_an_error_that_is_no_os_error(
    build: Build, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        raise MemoryError("no memory")

    engine = build(queue_depth=1)
    file = engine.open(str(swap_path / "data"), create=True)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", pwritev)
        with pytest.raises(TransferError, match="MemoryError: no memory"):
            engine.write(file, 0, pages(4096)).wait()
    file.close()
