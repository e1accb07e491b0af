"""What is in flight can be seen: in the error of a stall, and by signal."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.io_faults import Fault, FaultyEngine
from tests.io.conftest import pages
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.threads import ThreadsEngine
from tiered_zero.io.watch import SignalDump, dump_in_flight


@pytest.fixture
def stalled(swap_path: Path) -> Iterator[FaultyEngine]:
    inner = ThreadsEngine(direct=False, alignment=1, settings=IOSettings(), io_timeout_s=120.0)
    engine = FaultyEngine(inner, [Fault("write", nth, "stall") for nth in range(1, 41)])
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 4096, pages(8192))
    yield engine
    file.close()
    engine.close()


def test_the_table_names_each_request(stalled: FaultyEngine, swap_path: Path) -> None:
    head, row = dump_in_flight(stalled).splitlines()
    assert head == "I/O engine faulty threads: 1 requests in flight"
    assert row.split()[1:] == ["s", "write", "8192", "bytes", "at", "4096", str(swap_path / "data")]


def test_a_long_table_is_cut(stalled: FaultyEngine, swap_path: Path) -> None:
    file = stalled.open(str(swap_path / "data"))
    for _ in range(39):
        stalled.write(file, 0, pages(1))
    lines = dump_in_flight(stalled).splitlines()
    assert len(lines) == 34 and "4096" in lines[1] and lines[-1] == "  ... and 8 younger ones"
    file.close()


def test_sigusr1_prints_it_and_the_old_handler_is_restored(
    stalled: FaultyEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        old = signal.getsignal(signal.SIGUSR1)
        dump = SignalDump([stalled])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "write          8192 bytes at 4096" in capfd.readouterr().err
        assert seen == [signal.SIGUSR1], "the handler of before is called too"
        dump.close()
        dump.close()
        assert signal.getsignal(signal.SIGUSR1) is old
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_two_dumps_may_close_in_any_order(stalled: FaultyEngine, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    first, second = SignalDump([stalled]), SignalDump([stalled])
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert capfd.readouterr().err.count("in flight") == 1
    second.close()
    signal.signal(signal.SIGUSR1, before)


def test_on_another_thread_nothing_is_installed(stalled: FaultyEngine) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    installed: list[bool] = []

    def install() -> None:
        dump = SignalDump([stalled])
        installed.append(dump.installed)
        dump.close()

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert installed == [False] and signal.getsignal(signal.SIGUSR1) is before
