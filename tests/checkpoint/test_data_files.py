"""Reading data files window by window: any order of calls, read ahead or not, gives the bytes of the files."""

import time
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tiered_zero.checkpoint import data_files
from tiered_zero.checkpoint.data_files import BUFFER_NBYTES, NUM_BUFFERS, DataWriter
from tiered_zero.checkpoint.data_reader import DataReader, Run
from tiered_zero.errors import CorruptionError
from tiered_zero.io.engine import IOEngine
from tiered_zero.io.select import select_engine
from tiered_zero.mappings import map_memory
from tiered_zero.sizes import PAGE_NBYTES

SIZES = (5 * BUFFER_NBYTES + 3 * PAGE_NBYTES, 2 * BUFFER_NBYTES, 6 * BUFFER_NBYTES - PAGE_NBYTES)


@pytest.fixture
def engine(swap_path: Path):
    engine = select_engine(swap_path).engine
    yield engine
    engine.close()


@pytest.fixture
def written(swap_path: Path, engine: IOEngine, monkeypatch: pytest.MonkeyPatch):
    """(a reader of three files, their bytes)"""
    contents = [Random(index).randbytes(size) for index, size in enumerate(SIZES)]
    monkeypatch.setattr(data_files, "_MOST_FILE_NBYTES", PAGE_NBYTES)  # each append has a file of its own
    writer = DataWriter(swap_path, engine)
    for content in contents:
        memory = memoryview(map_memory(len(content)))
        memory[:] = content
        writer.append(memory).transfer.wait()
    files = writer.finish()
    writer.wait_durable()
    reader = DataReader(swap_path, files, engine)
    yield reader, contents
    reader.close()


def read(reader: DataReader, contents: list[bytes], *ranges: Run) -> None:
    windows = reader.windows_of(ranges)
    found = list(windows)
    for (window, memory), expected in zip(reader.read(windows), found, strict=True):
        assert window == expected
        assert memory == contents[window.file][window.start : window.stop]


def test_calls_in_any_order_give_the_bytes_of_the_files(written):
    reader, contents = written
    random = Random(0)
    position = (0, 0)
    for _ in range(60):
        if random.random() < 0.7:  # go on where the last call ended, as a load does
            file, start = position
        else:
            file = random.randrange(len(SIZES))
            start = random.randrange(SIZES[file] - 1)
        stop = min(SIZES[file], start + random.randrange(1, 4 * BUFFER_NBYTES))
        read(reader, contents, Run(file, start, stop))
        position = (file, stop - 1) if stop < SIZES[file] else ((file + 1) % len(SIZES), 0)


class CountingEngine:
    """Passes reads on, and lists where they begin."""

    def __init__(self, engine: IOEngine) -> None:
        self.open = engine.open
        self.begun: list[tuple[str, int]] = []
        self._engine = engine

    def read(self, file, offset, into):
        self.begun.append((file.path, offset))
        return self._engine.read(file, offset, into)


def test_a_load_in_the_order_of_the_files_reads_each_window_once_and_ahead(written, monkeypatch):
    reader, contents = written
    monkeypatch.setattr(reader, "_engine", engine := CountingEngine(reader._engine))
    step = BUFFER_NBYTES // 2 + PAGE_NBYTES  # two calls share a window
    calls = [
        Run(file, start, min(start + step, size)) for file, size in enumerate(SIZES) for start in range(0, size, step)
    ]
    read(reader, contents, calls[0])
    assert len(engine.begun) == 1
    read(reader, contents, calls[1])
    assert len(engine.begun) >= NUM_BUFFERS, "the second call goes on from the first"
    for call in calls[2:]:
        read(reader, contents, call)
    assert len(engine.begun) == len(set(engine.begun)) == sum(-(-size // BUFFER_NBYTES) for size in SIZES)


def test_damage_that_was_read_ahead_is_an_error_of_the_call_that_wants_it(written, swap_path):
    reader, contents = written
    path = sorted(swap_path.glob("*.bin"))[0]
    with path.open("r+b") as file:
        file.seek(4 * BUFFER_NBYTES + 17)
        file.write(bytes([contents[0][4 * BUFFER_NBYTES + 17] ^ 1]))
    read(reader, contents, Run(0, 0, BUFFER_NBYTES))
    read(reader, contents, Run(0, BUFFER_NBYTES, 3 * BUFFER_NBYTES))
    with pytest.raises(CorruptionError, match=path.name):
        read(reader, contents, Run(0, 3 * BUFFER_NBYTES, SIZES[0]))
    read(reader, contents, Run(1, 0, SIZES[1]))


def test_windows_come_in_their_order_whatever_pauses_and_repeats_there_are(written):
    reader, contents = written
    random = Random(1)
    windows = reader.windows_of(Run(file, 0, size) for file, size in enumerate(SIZES))
    for _ in range(20):
        wanted = [window for window in windows for _ in range(random.choice((1, 1, 2)))]  # of neighbouring groups
        expected = [*wanted]
        for pause in sorted(random.sample(range(len(wanted)), 2), reverse=True):
            wanted.insert(pause, None)
        found = []
        for window, memory in reader.read(wanted):
            found.append(window)
            assert memory == contents[window.file][window.start : window.stop]
        assert found == expected


def test_windows_are_asked_for_ahead_of_a_pause_and_not_across_it(written):
    reader, _ = written
    windows = reader.windows_of([Run(0, 0, SIZES[0])])
    taken: list[Run] = []

    def wanted():
        for window in windows:
            if window is windows[3]:
                yield None
                assert taken == windows[:3], "all before the pause were yielded, and are done with"
            yield window

    for window, _ in reader.read(wanted()):
        taken.append(window)
    assert taken == windows


class HeldTransfer:
    """Not done before it is waited for."""

    def __init__(self, transfer, finished: list[int], number: int) -> None:
        self._transfer, self._finished, self._number = transfer, finished, number

    def wait(self) -> None:
        self._transfer.wait()
        time.sleep(0.02)
        self._finished.append(self._number)


def test_a_reader_that_is_left_has_no_read_under_way_any_more(written, monkeypatch):
    reader, _ = written
    real, finished, begun = reader._engine, [], []

    class Engine:
        open = staticmethod(real.open)

        def read(self, file, offset, into):
            begun.append(offset)
            return HeldTransfer(real.read(file, offset, into), finished, len(begun))

    monkeypatch.setattr(reader, "_engine", Engine())
    windows = reader.windows_of([Run(0, 0, SIZES[0])])
    with closing(reader.read(windows)) as found:
        next(found)
        assert len(begun) == len(windows) <= NUM_BUFFERS
    assert len(finished) == len(windows)
