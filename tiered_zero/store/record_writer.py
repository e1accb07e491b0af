"""Append records to a new data file: the caller's memory goes to the disk without a copy, while a thread hashes it.

Blocks are reserved when the file is made, so that a full disk is an error early, and so that direct writes need not
change the file's size, which Linux does one at a time.

[Note: Checksums during training] A checksum reads memory that is in no cache: 0.1 s of a processor for 1.6 GB, and 0.3
s during training, which waits for its slowest thread. On a thread of low priority a step under a save took 4 to 8%
longer, on one of the usual priority 9 to 12% (3% without checksums). Beside other programs that could take long: the
usual priority takes over as soon as something waits for the save.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from tiered_zero.concurrency.transfer import Completion, Transfer, wait_all
from tiered_zero.errors import InternalError
from tiered_zero.io.disk import memory_address
from tiered_zero.io.engine import File, IOEngine
from tiered_zero.io.select import select_engine
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.store.checksums import CHUNK_NBYTES, digest
from tiered_zero.store.manifest import Contents, Record
from tiered_zero.store.ranges import Range
from tiered_zero.store.transfers import Joined, Worker

_LOWEST_PRIORITY = 19


@final
@dataclass(eq=False, kw_only=True)
class _Appended:
    """A record that is being written. `parts`: bytes of each append, and its checksums, once they are computed."""

    offset: int
    parts: list[tuple[int, list[int]]] = field(default_factory=list)


@final
class RecordWriter:
    """Appends to one data file. One thread drives it; `finish` and `wait_durable`, or `close`, end it."""

    def __init__(self, path: Path, engine: IOEngine | None = None, *, needed_nbytes: int = 0) -> None:
        """`path`: of the file, which is made by the first `append`. `engine`: None: one of its own, chosen then.
        `needed_nbytes`: what will be appended; 0: not known."""
        self._path = path
        self._engine, self._own_engine = engine, engine is None
        self._file: File | None = None
        self._nbytes, self._reserved_nbytes, self._needed_nbytes = 0, 0, needed_nbytes
        self._records: dict[str, _Appended] = {}
        self._transfers: deque[Transfer] = deque()
        self._is_patient = False
        self._hasher: Hasher | None = None

    def yield_to_training(self) -> None:
        """Take what training leaves of the processors, until `hurry`. Before the first `append`."""
        self._is_patient = True

    def hurry(self) -> None:
        """Yield no longer: something waits for what is written. Any thread; idempotent."""
        self._is_patient = False
        if self._hasher is not None:
            self._hasher.hurry()

    def append(self, name: str, memory: memoryview) -> Transfer:
        """Write whole pages, at an address in whole pages, as the next bytes of the record `name`: a new one, or the
        last.

        Nothing is copied: the memory must stay as it is until the transfer is done. Raises TransferError, and
        ConfigError if no I/O engine works.
        """
        nbytes = len(memory)
        if nbytes == 0 or nbytes % PAGE_NBYTES or memory_address(memory) % PAGE_NBYTES:
            raise InternalError(f"a data file takes whole pages; found {nbytes} bytes at {memory_address(memory):#x}")
        if name in self._records and name != next(reversed(self._records)):
            raise InternalError(f"record {name} cannot go on: another one lies behind it")
        engine, file, hasher = self._opened(nbytes)
        digests: list[int] = []
        offset = self._nbytes
        self._nbytes += nbytes
        self._records.setdefault(name, _Appended(offset=offset)).parts.append((nbytes, digests))
        transfer = Joined(engine.write(file, offset, memory), hasher.submit(memory, digests))
        while self._transfers and self._transfers[0].done():
            self._transfers.popleft().wait()
        self._transfers.append(transfer)
        return transfer

    def finish(self) -> Contents:
        """Wait for all writes, cut the file to its bytes, begin to make it durable. Raises OSError."""
        transfers, self._transfers = self._transfers, deque()
        wait_all(transfers)
        if self._file is not None and self._engine is not None:
            if self._reserved_nbytes != self._nbytes:
                os.truncate(self._path, self._nbytes)
            self._transfers.append(self._engine.sync(self._file))
        return Contents(
            capacity_nbytes=self._nbytes,
            weights=(1.0,),
            records=tuple(_record(name, own) for name, own in self._records.items()),
            ranges={name: _ranges(own) for name, own in self._records.items()},
        )

    def wait_durable(self) -> None:
        """Return when the file is on the disk, and close it. After `finish`. Raises TransferError."""
        transfers, self._transfers = self._transfers, deque()
        wait_all(transfers)
        self.close()

    def close(self) -> None:
        """Close the file, whatever state it is in, when nothing uses the callers' memory any more. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._hasher is not None:
            self._hasher.close()
        if self._own_engine and self._engine is not None:
            self._engine.close()

    def _opened(self, nbytes: int) -> tuple[IOEngine, File, Hasher]:
        """Open what the first append needs; see that the file has blocks for `nbytes` more."""
        if self._engine is None:
            self._engine = select_engine(self._path.parent).engine
        if self._file is None:
            self._file = self._engine.open(str(self._path), create=True)
        if self._hasher is None:
            self._hasher = Hasher(is_patient=self._is_patient)
            if not self._is_patient:  # `hurry` may have come before there was a hasher
                self._hasher.hurry()
        if self._nbytes + nbytes > self._reserved_nbytes:
            self._reserved_nbytes = align_up(max(self._needed_nbytes, self._nbytes + nbytes), PAGE_NBYTES)
            self._file.allocate(self._reserved_nbytes)
        return self._engine, self._file, self._hasher


def _record(name: str, own: _Appended) -> Record:
    nbytes = sum(part for part, _ in own.parts)
    return Record(name=name, nbytes=nbytes, committed=True, offsets=(own.offset,))


def _ranges(own: _Appended) -> list[Range]:
    found: list[Range] = []
    for nbytes, digests in own.parts:
        end = found[-1].end if found else 0
        for at, number in zip(range(0, nbytes, CHUNK_NBYTES), digests, strict=True):
            found.append(Range(end + at, end + min(at + CHUNK_NBYTES, nbytes), 0, number))
    return found


@final
class Hasher:
    """Computes checksums; until `hurry` on a thread that yields to training. See [Note: Checksums during training]."""

    def __init__(self, *, is_patient: bool) -> None:
        """`is_patient`: yield to training. Raises StoreError if a thread cannot be started."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._usual = Worker("tiered-zero-checkpoint-hash")
        self._patient: Worker | None = None
        if is_patient:
            self._patient = Worker("tiered-zero-checkpoint-hash-beside")
            self._patient.submit(_lower_priority)
        self._is_hurried = not is_patient

    def submit(self, memory: memoryview, digests: list[int]) -> Transfer:
        """Add the checksum of each chunk of `memory` to `digests`, which is the hasher's until that is done."""
        hashed = Completion()
        self._jobs.append(_job(memory, digests, hashed))
        worker = self._usual if self._is_hurried or self._patient is None else self._patient
        worker.submit(self._run_next)
        return hashed

    def hurry(self) -> None:
        """Go on at the usual priority: something waits. Any thread, any number of times."""
        self._is_hurried = True  # before the rest: what is submitted after that goes to the usual thread
        self._usual.submit(self._run_all)

    def close(self) -> None:
        """Finish what was submitted, and stop. Idempotent."""
        self.hurry()
        if self._patient is not None:
            self._patient.close()
        self._usual.close()

    def _run_all(self) -> None:
        while self._jobs:
            self._run_next()

    def _run_next(self) -> None:
        with suppress(IndexError):  # the other thread has taken it
            job = self._jobs.popleft()
            job()


def _job(memory: memoryview, digests: list[int], hashed: Completion) -> Callable[[], None]:
    def run() -> None:
        try:
            digests.extend(digest(memory[at : at + CHUNK_NBYTES]) for at in range(0, len(memory), CHUNK_NBYTES))
        except BaseException as error:  # the thread goes on; the transfer has the error
            hashed.fail(error)
        else:
            hashed.complete()

    return run


def _lower_priority() -> None:
    """Lower the priority of the calling thread alone, as Linux can."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
