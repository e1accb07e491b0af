"""Data files of a tag, read back verified.

By windows of whole chunks, each to one of a few buffers; one thread compares checksums while the caller copies from
buffers what was compared, and the next are read. To read to where the bytes go in the end would save that copy, but
takes 0.72 s for 1.6 GB, where buffers, which stay in the processor's cache, take 0.59 (fio, with 16 MiB of them: 0.52).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, final

from tiered_zero.checkpoint.data_files import BUFFER_NBYTES, NUM_BUFFERS, staging_buffers
from tiered_zero.checkpoint.tag_manifest import CHUNK_NBYTES, DataFile
from tiered_zero.errors import CorruptionError
from tiered_zero.io.engine import File, IOEngine, IOSettings
from tiered_zero.sizes import MIB
from tiered_zero.store.checksums import digest
from tiered_zero.store.transfers import Once, Worker
from tiered_zero.transfer import Transfer, wait_all, wait_quietly

READ_BLOCKS: Final = IOSettings(block_size=MIB)
"""Of a system call. With 4 MiB, which suits training and saves beside it, a load ends later: windows come in order, and
what is behind a late block waits."""


class Run(NamedTuple):
    """Bytes `[start, stop)` of the file number `file`."""

    file: int
    start: int
    stop: int


@final
class DataReader:
    """Reads data files by windows, each to a buffer, verified. One thread drives it.

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

    def read(self, wanted: Iterable[Run | None]) -> Generator[tuple[Run, memoryview], None, None]:
        """The bytes of each window that is wanted, in order, until the next one is asked for.

        Windows are taken from `wanted`, and asked for, ahead of those that are yielded. None: what follows is not known
        until all that was wanted so far has been yielded. There, and at the end, what follows in the files is read
        ahead, where the windows before it went on from those of the time before. Raises CorruptionError for a checksum
        that does not match, and TransferError.
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
                for _, _, problems in self._read(iter(self.windows_of([Run(index, 0, file.nbytes)]))):
                    found += problems
            except OSError as error:
                found.append(str(error))
        return found

    def _read(self, wanted: Iterator[Run | None]) -> Generator[tuple[Run, memoryview, list[str]], None, None]:
        """Each window with its bytes, and what is wrong with them."""
        if self._worker is None:
            self._free, self._worker = staging_buffers(), Worker("tiered-zero-checkpoint-verify")
        ahead: deque[Run] = deque()
        following: Run | None = None
        is_paused = has_ended = goes_on = False
        try:
            while not has_ended or ahead:
                while not is_paused and len(ahead) < NUM_BUFFERS:
                    if following is None:
                        try:
                            following = next(wanted)
                        except StopIteration:
                            has_ended = True
                        is_paused = following is None
                    elif self._request(following, ahead):
                        if not ahead:  # the first after a pause
                            last = self._last
                            goes_on = last is not None and following in (last, self._following(last))
                        ahead.append(following)
                        following = None
                    else:
                        break
                if is_paused and goes_on and ahead:
                    self._read_ahead(ahead)
                if ahead:
                    verified = self._windows[ahead[0]]
                    verified.wait()
                    self._last = ahead[0]
                    yield ahead[0], verified.memory, verified.problems
                    ahead.popleft()
                elif not has_ended:
                    is_paused = False
        finally:
            for window in ahead:
                wait_quietly(self._windows[window])

    def _read_ahead(self, ahead: Sequence[Run]) -> None:
        """Read what follows `ahead`, which has windows, to the buffers that are left."""
        kept = [*ahead]
        while len(kept) < NUM_BUFFERS and (window := self._following(kept[-1])) and self._request(window, kept):
            kept.append(window)

    def _request(self, window: Run, kept: Sequence[Run]) -> bool:
        """Begin to read a window; False where all buffers are taken by windows that are `kept`."""
        if window in self._windows:
            return True
        if not self._free:
            if (oldest := next((run for run in self._windows if run not in kept), None)) is None:
                return False
            wait_quietly(self._windows[oldest])
            self._free.append(self._windows.pop(oldest).buffer)
        buffer, file = self._free[-1], self._manifest_files[window.file]
        memory = buffer[: window.stop - window.start]
        transfer = self._engine.read(self._file(window.file), window.start, memory)
        verified = _Verified(window, buffer, memory, transfer, file, self._directory / file.name)
        self._windows[window] = verified
        self._free.pop()
        assert self._worker is not None, "made by the first read"
        self._worker.submit(verified.run)
        return True

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
            wait_quietly(verified)
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
class _Verified(Once):
    """A window that is being read and compared: on the worker, or by the first wait, should that come before it.

    `memory`: the part of `buffer` that it takes. `problems`: chunks that are not as written, once it is done."""

    def __init__(
        self, window: Run, buffer: memoryview, memory: memoryview, transfer: Transfer, file: DataFile, path: Path
    ) -> None:
        super().__init__(self._compare)
        self.buffer, self.memory = buffer, memory
        self.problems: list[str] = []
        self._start, self._transfer, self._file, self._path = window.start, transfer, file, path

    def _compare(self) -> None:
        """Wait for the bytes, compare their checksums."""
        wait_all([self._transfer])  # then the memory is not used any more, whatever was raised
        problems = []
        for at in range(0, len(self.memory), CHUNK_NBYTES):
            chunk = self.memory[at : at + CHUNK_NBYTES]
            expected, found = self._file.digests[(self._start + at) // CHUNK_NBYTES], digest(chunk)
            if found != expected:
                problems.append(
                    f"{self._path}: the {len(chunk)} bytes at offset {self._start + at} are not those written (xxh3 "
                    f"{expected:016x} expected, {found:016x} found)."
                )
        self.problems = problems
