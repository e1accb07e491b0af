"""What is in flight can be seen: in the error of a stall, and on a signal."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiered_zero
from tests.fakes.io_faults import Fault, FaultyEngine
from tests.io.conftest import pages
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import IOSettings, dump_in_flight, watch


@pytest.fixture
def stalled(swap_path: Path) -> Iterator[FaultyEngine]:
    inner = AiofilesEngine(direct=False, settings=IOSettings(), io_timeout_s=120.0)
    engine = FaultyEngine(inner, [Fault("write", nth, "stall") for nth in range(1, 41)])
    file = engine.open(str(swap_path / "data"), create=True)
    engine.write(file, 4096, pages(8192))
    yield engine
    file.close()
    engine.close()


def test_the_table_names_each_request(stalled: FaultyEngine, swap_path: Path) -> None:
    head, row = dump_in_flight(stalled).splitlines()
    assert head == "I/O engine faulty aiofiles: 1 requests in flight"
    assert row.split()[1:] == ["s", "write", "8192", "bytes", "at", "4096", str(swap_path / "data")]


def test_a_long_table_is_cut(stalled: FaultyEngine, swap_path: Path) -> None:
    file = stalled.open(str(swap_path / "data"))
    for _ in range(39):
        stalled.write(file, 0, pages(1))
    lines = dump_in_flight(stalled).splitlines()
    assert len(lines) == 34 and "4096" in lines[1] and lines[-1] == "  ... and 8 younger ones"
    file.close()


def test_a_signal_of_the_programs_choice_prints_it_and_then_calls_the_handler_of_before(
    stalled: FaultyEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        watch(stalled)
        tiered_zero.dump_on(signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert "write          8192 bytes at 4096" in capfd.readouterr().err
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
