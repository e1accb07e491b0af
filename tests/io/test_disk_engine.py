"""What every engine owes: the contract of io/engine.py, on real files, direct and buffered."""

import errno
import gc
import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.io.conftest import BuildEngine, pages
from tiered_zero.errors import TransferError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import ENGINES

PATTERN = bytes(random.Random(1).randbytes(4099))  # a prime length: no two pages look the same


@pytest.mark.parametrize("nbytes", [0, 4096, 8192, 8192 * 3 + 4096, 1 << 20])
def test_what_is_written_is_read_back(build_engine: BuildEngine, direct: bool, swap_path: Path, nbytes: int) -> None:
    engine = build_engine(direct=direct)
    file = engine.open(str(swap_path / "data"), create=True)
    file.allocate(4096 + nbytes)
    data, into = pages(nbytes, PATTERN), pages(nbytes)
    transfer = engine.write(file, 4096, data)
    transfer.wait()
    assert (
        transfer.done()
        and transfer.seconds > 0.0
        and (transfer.request.kind, transfer.request.nbytes) == ("write", nbytes)
    )
    engine.sync(file).wait()
    engine.read(file, 4096, into).wait()
    assert into == data
    assert (swap_path / "data").read_bytes()[4096:] == bytes(data)
    assert engine.in_flight() == []
    file.close()


@pytest.mark.parametrize("nbytes", [1, 511, 513, 4097, 70001])
def test_buffered_files_take_any_length(build_engine: BuildEngine, swap_path: Path, nbytes: int) -> None:
    engine = build_engine()
    file = engine.open(str(swap_path / "data"), create=True)
    data, into = pages(nbytes, PATTERN), pages(nbytes)
    engine.write(file, 7, data).wait()
    engine.read(file, 7, into).wait()
    assert into == data
    file.close()


def test_many_requests_are_on_their_way_at_once(build_engine: BuildEngine, direct: bool, swap_path: Path) -> None:
    engine = build_engine(direct=direct)
    files = [engine.open(str(swap_path / name), create=True) for name in ("a", "b")]
    chunks = [
        (files[index % 2], index // 2 * 16384, pages(4096 + index % 4 * 4096, PATTERN[index:])) for index in range(200)
    ]
    transfers = [engine.write(*chunk) for chunk in random.Random(2).sample(chunks, len(chunks))]
    for transfer in transfers:
        transfer.wait()
    back = [pages(data.nbytes) for _, _, data in chunks]
    for transfer in [engine.read(file, offset, into) for (file, offset, _), into in zip(chunks, back, strict=True)]:
        transfer.wait()
    assert all(into == data for (_, _, data), into in zip(chunks, back, strict=True))
    for file in files:
        file.close()


def test_several_threads_may_submit_and_wait(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    file = engine.open(str(swap_path / "data"), create=True)
    wrong: list[int] = []

    def work(worker: int) -> None:
        data, into = pages(40000, PATTERN[worker:]), pages(40000)
        for turn in range(10):
            offset = (worker * 10 + turn) * 40000
            engine.write(file, offset, data).wait()
            engine.read(file, offset, into).wait()
            if into != data:
                wrong.append(worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and engine.in_flight() == []
    file.close()


def test_the_memory_of_a_finished_request_is_released(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    file = engine.open(str(swap_path / "data"), create=True)
    data = pages(30000, PATTERN)
    transfers = []
    for act in (engine.write, engine.read):  # one after the other: nothing orders them in flight
        transfers.append(act(file, 0, data))
        transfers[-1].wait()
    short = engine.read(file, 20000, data)
    with pytest.raises(TransferError):
        short.wait()
    data.release()  # raises BufferError while any transfer still holds it
    file.close()


def test_write_takes_read_only_memory_and_read_does_not(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 0, memoryview(PATTERN)).wait()
    assert (swap_path / "data").read_bytes() == PATTERN
    with pytest.raises(TransferError, match="read-only"):
        engine.read(file, 0, memoryview(PATTERN))
    engine.sync(file).wait()  # a caller's mistake does not latch
    file.close()


def test_the_end_of_the_file_is_an_error_that_latches(build_engine: BuildEngine, direct: bool, swap_path: Path) -> None:
    engine = build_engine(direct=direct)
    path = swap_path / "data"
    path.write_bytes(bytes(12288 + 100))
    file = engine.open(str(path))
    transfer = engine.read(file, 4096, pages(16384))
    for _ in range(2):
        with pytest.raises(TransferError) as caught:
            transfer.wait()
        text = str(caught.value)
        assert str(path) in text and "read of 16384 bytes at offset 4096" in text and "the file has 12388 bytes" in text
        assert "wanted 8192 bytes, got 100" in text or "wanted 16384 bytes, got 8292" in text
    with pytest.raises(TransferError, match="the file has 12388 bytes"):
        engine.read(file, 0, pages(4096))
    with pytest.raises(TransferError, match="the file has 12388 bytes"):
        engine.sync(file)
    assert engine.in_flight() == []
    file.close()


def test_a_failure_without_a_wait_latches_too(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    path = swap_path / "data"
    path.write_bytes(bytes(100))
    file = engine.open(str(path))
    engine.read(file, 0, pages(50))
    transfer = engine.read(file, 0, pages(200))
    while not transfer.done():
        time.sleep(0.001)
    with pytest.raises(TransferError, match="the file has 100 bytes"):
        engine.sync(file)
    file.close()


def test_misaligned_requests_are_refused_before_they_start(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    file = engine.open(str(swap_path / "data"), create=True)
    file.direct = True
    for offset, memory in ((512, pages(4096)), (0, pages(512)), (0, pages(8192)[512:4608])):
        with pytest.raises(TransferError, match="multiples of 4096"):
            engine.write(file, offset, memory)
    engine.write(file, 4096, pages(8192)[4096:]).wait()
    file.close()


def test_files_are_private_new_and_no_links(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    path = swap_path / "data"
    file = engine.open(str(path), create=True)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TransferError, match="EEXIST"):
        engine.open(str(path), create=True)
    (swap_path / "link").symlink_to(path)
    with pytest.raises(TransferError, match=r"ELOOP.*symbolic link"):
        engine.open(str(swap_path / "link"))
    with pytest.raises(TransferError, match="ENOENT") as caught:
        engine.open(str(swap_path / "none"))
    assert caught.value.errno == errno.ENOENT
    file.close()


def test_files_can_be_opened_for_reading_alone(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    path = swap_path / "data"
    path.write_bytes(PATTERN)
    file = engine.open(str(path), writable=False)
    into = pages(len(PATTERN))
    engine.read(file, 0, into).wait()
    assert into == PATTERN
    with pytest.raises(TransferError, match="EBADF"):
        engine.write(file, 0, into).wait()
    assert path.read_bytes() == PATTERN
    file.close()


def test_nothing_goes_through_what_is_closed(build_engine: BuildEngine, swap_path: Path) -> None:
    engine = build_engine()
    file, other = (engine.open(str(swap_path / name), create=True) for name in ("a", "b"))
    data = pages(1 << 20, PATTERN)
    transfer = engine.write(file, 0, data)
    file.close()  # waits for what is in flight
    file.close()
    transfer.wait()
    assert (swap_path / "a").read_bytes() == data
    with pytest.raises(TransferError, match="the file has been closed"):
        engine.read(file, 0, data)
    transfer = engine.write(other, 0, data)
    engine.close()
    engine.close()
    assert transfer.done()
    transfer.wait()
    with pytest.raises(TransferError, match="the engine has been closed"):
        engine.write(other, 0, data)
    other.close()
    assert (swap_path / "b").read_bytes() == data


@pytest.mark.usefixtures("no_leaks")
def test_closing_leaves_neither_thread_nor_file(build_engine: BuildEngine, swap_path: Path) -> None:
    def num_threads() -> int:  # of all kinds: those of the native engine too
        return len(os.listdir("/proc/self/task"))

    before = num_threads()
    engine = build_engine()
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 0, pages(100000)).wait()
    assert num_threads() > before
    file.close()
    engine.close()
    deadline_s = time.monotonic() + 300
    while num_threads() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)  # a joined thread of Python's is still about to leave the kernel
    assert num_threads() <= before


def test_a_forked_process_has_no_workers_and_raises(
    build_engine: BuildEngine, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine()
    file = engine.open(str(swap_path / "data"), create=True)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(TransferError, match="forked"):
            engine.sync(file)
    engine.sync(file).wait()
    file.close()


@pytest.mark.parametrize("reads", [False, True])
def test_an_engine_that_is_dropped_ends_its_threads(engine_name: str, swap_path: Path, reads: bool) -> None:
    before = set(os.listdir("/proc/self/task"))
    (swap_path / "data").write_bytes(bytes(1 << 20))
    engine = ENGINES[engine_name](direct=False, settings=IOSettings(), io_timeout_s=60.0)
    assert set(os.listdir("/proc/self/task")) - before
    if reads:
        file = engine.open(str(swap_path / "data"))
        engine.read(file, 0, pages(1 << 20))
        del file
    del engine
    deadline_s = time.monotonic() + 60
    while gc.collect() >= 0 and set(os.listdir("/proc/self/task")) - before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not set(os.listdir("/proc/self/task")) - before
