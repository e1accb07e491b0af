"""Data files of a tag: appended through an I/O engine with a checksum for each MiB, and read back verified.

Writing: the caller's memory goes to the file without a copy, several MiB at a time, while one thread computes checksums
in the order of the file. Blocks are reserved when a file is made, so that a full disk is an error early, and so that
direct writes need not change the file's size, which Linux does one at a time. Reading: windows of whole chunks, each to
where its bytes go, or to one of a few buffers; one thread compares checksums while the caller copies from buffers what
was compared, and the next are read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, final

import xxhash

from tiered_zero.checkpoint.manifest import CHUNK_NBYTES, DataFile
from tiered_zero.errors import CorruptionError, InternalError
from tiered_zero.io.disk_file import memory_address
from tiered_zero.io.engine import File, IOEngine
from tiered_zero.io.select import select_engine
from tiered_zero.mappings import map_memory
from tiered_zero.sizes import GIB, MIB, PAGE_NBYTES, align_up
from tiered_zero.store.transfers import Worker, digest
from tiered_zero.transfer import Completion, Transfer, wait_all

BUFFER_NBYTES: Final = 2 * MIB
NUM_BUFFERS: Final = 8
"""Of a writer's staging memory, and of a reader's: 16 MiB, most of which are on their way at any time."""

MOST_AHEAD: Final = 32
"""Windows that are on their way at once: those that go to the caller's memory have no buffers to bound them."""

_MOST_FILE_NBYTES = 8 * GIB
"""A file takes no further extent where it would become larger than this."""


def staging_buffers() -> list[memoryview]:
    """The fixed memory of one writer or reader, in huge pages where there are any, and kept from forked children."""
    mapping = memoryview(map_memory(NUM_BUFFERS * BUFFER_NBYTES, "MADV_DONTFORK", "MADV_HUGEPAGE"))
    return [mapping[index * BUFFER_NBYTES : (index + 1) * BUFFER_NBYTES] for index in range(NUM_BUFFERS)]


@final
class _Joined(Transfer):
    """Several transfers as one."""

    def __init__(self, *parts: Transfer) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        wait_all(self._parts)


class Appended(NamedTuple):
    """Where memory went: byte `offset` of the file number `file`, once `transfer` is done."""

    file: int
    offset: int
    transfer: Transfer


@final
@dataclass(eq=False)
class _OpenFile:
    """A data file that is being written. `nbytes`: appended so far; `reserved_nbytes`: blocks that it has.

    `digests`, `hashing` belong to the hashing thread until it is idle.
    """

    name: str
    file: File
    nbytes: int = 0
    reserved_nbytes: int = 0
    digests: list[int] = field(default_factory=list)
    hashing: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    hashed_nbytes: int = 0

    def hash(self, memory: memoryview) -> None:
        """Take in the next bytes of the file."""
        start = 0
        while start < len(memory):
            stop = min(len(memory), start + CHUNK_NBYTES - self.hashed_nbytes % CHUNK_NBYTES)
            if stop - start == CHUNK_NBYTES:
                self.digests.append(digest(memory[start:stop]))
            else:
                self.hashing.update(memory[start:stop])
                if (self.hashed_nbytes + stop - start) % CHUNK_NBYTES == 0:
                    self.end_chunk()
            self.hashed_nbytes += stop - start
            start = stop

    def end_chunk(self) -> None:
        """Enter the checksum of the chunk that was begun."""
        self.digests.append(self.hashing.intdigest())
        self.hashing.reset()


@final
class DataWriter:
    """Appends to the data files of one tag. One thread drives it; `finish` and `wait_durable`, or `close`, end it."""

    def __init__(
        self, directory: Path, engine: IOEngine | None = None, *, needed_nbytes: int = 0, prefix: str = "data-00000"
    ) -> None:
        """`engine`: None: one of its own, chosen when there is something to write. `needed_nbytes`: what will be
        appended; 0: not known. `prefix`: of the file names, one for each rank."""
        self._directory, self._prefix = directory, prefix
        self._engine, self._own_engine = engine, engine is None
        self._left_nbytes = needed_nbytes
        self._files: list[_OpenFile] = []
        self._transfers: deque[Transfer] = deque()
        self._worker: Worker | None = None

    @property
    def nbytes(self) -> int:
        """Appended so far, in all files."""
        return sum(file.nbytes for file in self._files)

    def append(self, memory: memoryview) -> Appended:
        """Write whole pages, at an address in whole pages, behind what was appended before.

        Raises TransferError, and ConfigError where no I/O engine works.

        Nothing is copied: the memory must stay as it is until the transfer is done.
        """
        nbytes = len(memory)
        if nbytes == 0 or nbytes % PAGE_NBYTES or memory_address(memory) % PAGE_NBYTES:
            raise InternalError(f"a data file takes whole pages; found {nbytes} bytes at {memory_address(memory):#x}")
        if self._engine is None:
            self._engine = select_engine(self._directory).engine
        if self._worker is None:
            self._worker = Worker("tiered-zero-checkpoint-hash")
        file = self._file_for(self._engine, nbytes)
        offset = file.nbytes
        file.nbytes += nbytes
        self._left_nbytes = max(0, self._left_nbytes - nbytes)
        written = self._engine.write(file.file, offset, memory)
        hashed = Completion()
        self._worker.submit(_hash_job(file, memory, hashed))
        transfer = _Joined(written, hashed)
        while self._transfers and self._transfers[0].done():
            self._transfers.popleft().wait()
        self._transfers.append(transfer)
        return Appended(len(self._files) - 1, offset, transfer)

    def finish(self) -> tuple[DataFile, ...]:
        """Wait for all writes, cut each file to its bytes, begin to make it durable. Raises OSError."""
        transfers, self._transfers = self._transfers, deque()
        wait_all(transfers)
        finished = []
        for file in self._files:
            if file.reserved_nbytes != file.nbytes:
                os.truncate(file.file.path, file.nbytes)
            if file.nbytes % CHUNK_NBYTES:
                file.end_chunk()
            finished.append(DataFile(name=file.name, nbytes=file.nbytes, digests=tuple(file.digests)))
            assert self._engine is not None, "it opened the file"
            self._transfers.append(self._engine.sync(file.file))
        return tuple(finished)

    def wait_durable(self) -> None:
        """Return when all files are on the disk, and close them. After `finish`. Raises TransferError."""
        transfers, self._transfers = self._transfers, deque()
        wait_all(transfers)
        self.close()

    def close(self) -> None:
        """Close the files, whatever state they are in, when nothing uses the callers' memory any more. Idempotent; one
        that was interrupted is carried through by the next."""
        for file in self._files:
            file.file.close()
        if self._worker is not None:
            self._worker.close()
        if self._own_engine and self._engine is not None:
            self._engine.close()

    def _file_for(self, engine: IOEngine, nbytes: int) -> _OpenFile:
        """The file that takes the next `nbytes`, with blocks for them."""
        if not self._files or self._files[-1].nbytes + nbytes > max(_MOST_FILE_NBYTES, nbytes):
            name = f"{self._prefix}-{len(self._files):05d}.bin"
            self._files.append(_OpenFile(name, engine.open(str(self._directory / name), create=True)))
        file = self._files[-1]
        if file.nbytes + nbytes > file.reserved_nbytes:
            ahead_nbytes = min(self._left_nbytes, _MOST_FILE_NBYTES - file.nbytes)
            reserved_nbytes = align_up(file.nbytes + max(ahead_nbytes, nbytes), PAGE_NBYTES)
            file.file.allocate(reserved_nbytes)
            file.reserved_nbytes = reserved_nbytes
        return file


def _hash_job(file: _OpenFile, memory: memoryview, hashed: Completion) -> Callable[[], None]:
    def run() -> None:
        try:
            file.hash(memory)
        except BaseException as error:  # the thread goes on; the transfer has the error
            hashed.fail(error)
        else:
            hashed.complete()

    return run


class Run(NamedTuple):
    """Bytes `[start, stop)` of the file number `file`."""

    file: int
    start: int
    stop: int


class Wanted(NamedTuple):
    """A window to read. `into`: memory in whole pages that takes its bytes, and stays the reader's until it is yielded,
    in place of a buffer."""

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
                    raise CorruptionError(f"{problems[0]} Check the disk, and load another checkpoint, into a new engine.")
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
                while not is_paused and len(ahead) < MOST_AHEAD:
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
        verified = self._windows[window] = _Verified(window, buffer, into, transfer)
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
@dataclass(eq=False)
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
