"""Data files of a tag, read back verified.

By windows of whole chunks, each to where its bytes go, or to one of a few buffers; one thread compares checksums while
the caller copies from buffers what was compared, and the next are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

from tiered_zero.checkpoint.data_files import BUFFER_NBYTES, NUM_BUFFERS, staging_buffers
from tiered_zero.checkpoint.manifest import CHUNK_NBYTES, DataFile
from tiered_zero.errors import CorruptionError
from tiered_zero.io.engine import File, IOEngine
from tiered_zero.store.checksums import digest
from tiered_zero.store.transfers import Worker
from tiered_zero.transfer import Completion, Transfer

_MOST_AHEAD = 32
"""Windows that are asked for ahead of the one that is yielded, where they need no buffer. They come back in order: with
8 of them, as many as there are buffers, workers are idle behind a late one."""


class Run(NamedTuple):
    """Bytes `[start, stop)` of the file number `file`."""

    file: int
    start: int
    stop: int


class Wanted(NamedTuple):
    """A window to read. `into`: memory in whole pages that takes its bytes, and stays the reader's until it is yielded,
    in place of a buffer; the window may then be several that follow each other."""

    run: Run
    into: memoryview | None = None


@final
class DataReader:
    """Reads data files by windows, each to a buffer or to memory of the caller, verified. One thread drives it.

    The files were checked against the manifest before."""

    def __init__(self, directory: Path, files: Sequence[DataFile], engine: IOEngine) -> None:
        self._directory, self._manifest_files, self._engine = directory, files, engine
        self._files: dict[int, File] = {}
        self._free: list[memoryview] = []
        self._worker: Worker | None = None
        self._windows: dict[Run, _Verified] = {}
        """Those that are read or kept, in the order in which they were asked for."""
        self._last: Run | None = None

    def windows_of(self, ranges: Iterable[Run]) -> list[Run]:
        """What must be read for these ranges: whole windows, each once, in the order of the files."""
        found: dict[Run, None] = {}
        for file, start, stop in sorted(ranges):
            for at in range(start - start % BUFFER_NBYTES, stop, BUFFER_NBYTES):
                found[self._window(file, at)] = None
        return list(found)

    def read(self, wanted: Iterable[Wanted | None]) -> Generator[tuple[Run, memoryview], None, None]:
        """The bytes of each window that is wanted, in order; those in a buffer until the next one is asked for.

        Windows are taken from `wanted`, and asked for, ahead of those that are yielded. None: what follows is not known
        until all that was wanted so far has been yielded. There, and at the end, what follows in the files is read
        ahead, where the windows before it went on from those of the time before. Raises CorruptionError for a checksum
        that does not match, and TransferError. When it ends, or is closed, nothing writes to memory of the caller.
        """
        with closing(self._read(iter(wanted))) as windows:
            for window, memory, problems in windows:
                if problems:
                    raise CorruptionError(
                        f"{problems[0]} Check the disk, and load another checkpoint, into a new engine."
                    )
                yield window, memory

    def damage(self) -> list[str]:
        """Read all files; a line for each chunk that is not as written, and for a file that cannot be read on."""
        found: list[str] = []
        for index, file in enumerate(self._manifest_files):
            try:
                wanted = (Wanted(window) for window in self.windows_of([Run(index, 0, file.nbytes)]))
                for _, _, problems in self._read(wanted):
                    found += problems
            except OSError as error:
                found.append(str(error))
        return found

    def _read(self, wanted: Iterator[Wanted | None]) -> Generator[tuple[Run, memoryview, list[str]], None, None]:
        """Each window with its bytes, and what is wrong with them."""
        if self._worker is None:
            self._free, self._worker = staging_buffers(), Worker("tiered-zero-checkpoint-verify")
        ahead: deque[Run] = deque()
        following: Wanted | None = None
        is_paused = has_ended = goes_on = False
        try:
            while not has_ended or ahead:
                while not is_paused and len(ahead) < _MOST_AHEAD:
                    if following is None:
                        try:
                            following = next(wanted)
                        except StopIteration:
                            has_ended = True
                        is_paused = following is None
                    elif self._request(following, ahead):
                        if not ahead:  # the first after a pause
                            last = self._last
                            goes_on = last is not None and following.run in (last, self._following(last))
                        ahead.append(following.run)
                        following = None
                    else:
                        break
                if is_paused and goes_on and ahead:
                    self._read_ahead(ahead)
                if ahead:
                    verified = self._windows[ahead[0]]
                    verified.compared.wait()
                    self._last = ahead[0]
                    yield ahead[0], verified.memory, verified.problems
                    self._release(ahead.popleft(), ahead)
                elif not has_ended:
                    is_paused = False
        finally:
            while ahead:
                _wait_quietly(self._windows[ahead[0]].compared)
                self._release(ahead.popleft(), ahead)

    def _read_ahead(self, ahead: Sequence[Run]) -> None:
        """Read what follows `ahead`, which has windows, to the buffers that are left."""
        kept = [*ahead]
        while len(kept) < NUM_BUFFERS and (window := self._following(kept[-1])) and self._request(Wanted(window), kept):
            kept.append(window)

    def _request(self, wanted: Wanted, kept: Sequence[Run]) -> bool:
        """Begin to read a window; False where all buffers are taken by windows that are `kept`."""
        window, into = wanted
        if window in self._windows:
            return True
        buffer: memoryview | None = None
        if into is None:
            if not self._free:
                unused = (run for run, held in self._windows.items() if held.buffer is not None and run not in kept)
                if (oldest := next(unused, None)) is None:
                    return False
                _wait_quietly(self._windows[oldest].compared)
                evicted = self._windows.pop(oldest).buffer
                assert evicted is not None, "it has one"
                self._free.append(evicted)
            buffer = self._free[-1]
            into = buffer[: window.stop - window.start]
        transfer = self._engine.read(self._file(window.file), window.start, into)
        verified = self._windows[window] = _Verified(run=window, buffer=buffer, memory=into, transfer=transfer)
        if buffer is not None:
            self._free.pop()
        assert self._worker is not None, "made by the first read"
        self._worker.submit(partial(verified.compare, self._directory, self._manifest_files[window.file]))
        return True

    def _release(self, window: Run, ahead: Sequence[Run]) -> None:
        """Forget a window in the caller's memory, which may change now, unless it is wanted again at once."""
        if self._windows[window].buffer is None and window not in ahead:
            del self._windows[window]

    def _window(self, file: int, at: int) -> Run:
        return Run(file, at, min(at + BUFFER_NBYTES, self._manifest_files[file].nbytes))

    def _following(self, window: Run) -> Run | None:
        """The next window of the file, or the first of the next file; None at the end."""
        if window.stop < self._manifest_files[window.file].nbytes:
            return self._window(window.file, window.stop)
        return self._window(window.file + 1, 0) if window.file + 1 < len(self._manifest_files) else None

    def close(self) -> None:
        """Idempotent."""
        for verified in self._windows.values():
            _wait_quietly(verified.compared)
        self._windows, self._last = {}, None
        while self._files:
            self._files.popitem()[1].close()
        worker, self._worker, self._free = self._worker, None, []
        if worker is not None:
            worker.close()

    def _file(self, index: int) -> File:
        if index not in self._files:
            path = self._directory / self._manifest_files[index].name
            self._files[index] = self._engine.open(str(path), writable=False)
        return self._files[index]


@final
@dataclass(eq=False, kw_only=True)
class _Verified:
    """A run that is being read and compared. `memory`: the part of `buffer` that it takes, or the caller's. `problems`:
    chunks that are not as written, once `compared` is done."""

    run: Run
    buffer: memoryview | None
    memory: memoryview
    transfer: Transfer
    compared: Completion = field(default_factory=Completion)
    problems: list[str] = field(default_factory=list)

    def compare(self, directory: Path, file: DataFile) -> None:
        """On the worker: wait for the bytes, compare their checksums."""
        try:
            self.transfer.wait()
            for at in range(0, len(self.memory), CHUNK_NBYTES):
                chunk = self.memory[at : at + CHUNK_NBYTES]
                expected, found = file.digests[(self.run.start + at) // CHUNK_NBYTES], digest(chunk)
                if found != expected:
                    self.problems.append(
                        f"{directory / file.name}: the {len(chunk)} bytes at offset {self.run.start + at} are not "
                        f"those written (xxh3 {expected:016x} expected, {found:016x} found)."
                    )
        except BaseException as error:  # it belongs to the reading thread
            self.compared.fail(error)
        else:
            self.compared.complete()


def _wait_quietly(transfer: Transfer) -> None:
    """Wait until the memory is not used any more; another error is on its way already."""
    try:
        transfer.wait()
    except Exception as error:
        error.__traceback__ = None
