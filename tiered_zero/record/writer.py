"""Append records to a new data file: memory goes to the disk without a copy while a thread hashes it.

Blocks are reserved when the file is made: a full disk is then an error early, and direct writes need not change the
file's size, which Linux allows to one write at once.

[Note: Checksums during training] Hashing reads memory that is in no cache: 0.1 s of a processor for 1.6 GB, and 0.3 s
during training, which waits for its slowest thread: a step under a save took 9 to 12% longer, 3% without checksums. A
hashing thread of low priority made that 4 to 8%, but next to other programs it could take long, and needed a second
thread of normal priority as soon as something waited for the save."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

from tiered_zero.concurrency.transfer import Completion, Joined, Transfer, Worker, wait_all
from tiered_zero.errors import InternalError
from tiered_zero.io.engine import File, IOEngine, memory_address
from tiered_zero.io.select import select_engine
from tiered_zero.record.manifest import Contents, Range, Record
from tiered_zero.record.reader import cut, hashed
from tiered_zero.sizes import PAGE_NBYTES, align_up


@final
@dataclass(eq=False, kw_only=True)
class _Appended:
    """A record that is being written, from byte `offset` of the file. `parts`: for each append a list of its ranges,
    which is filled when the checksums are computed."""

    offset: int
    nbytes: int = 0
    parts: list[list[Range]] = field(default_factory=list)


@final
class RecordWriter:
    """Appends records to one data file. One thread drives the writer; `finish` and `wait_durable`, or `close`, end
    it."""

    def __init__(self, path: Path, engine: IOEngine | None = None, *, needed_nbytes: int = 0) -> None:
        """`path`: the file, which the first `append` makes. `engine`: moves the bytes; None: choose one then.
        `needed_nbytes`: bytes that will be appended in all; 0 if unknown."""
        self._path = path
        self._engine, self._own_engine = engine, engine is None
        self._file: File | None = None
        self._nbytes, self._reserved_nbytes, self._needed_nbytes = 0, 0, needed_nbytes
        self._records: dict[str, _Appended] = {}
        self._transfers: deque[Transfer] = deque()
        self._hashing: Worker | None = None

    def append(self, name: str, memory: memoryview) -> Transfer:
        """Write whole pages, at a page-aligned address, as the next bytes of record `name`, which is a new record or
        the last one. Nothing is copied: the memory must not change until the transfer is done. Raises TransferError,
        and ConfigError if no I/O engine works."""
        nbytes = len(memory)
        if nbytes == 0 or nbytes % PAGE_NBYTES or memory_address(memory) % PAGE_NBYTES:
            raise InternalError(f"a data file takes whole pages; found {nbytes} bytes at {memory_address(memory):#x}")
        if name in self._records and name != next(reversed(self._records)):
            raise InternalError(f"record {name} cannot go on: another one lies behind it")
        engine, file, hashing = self._opened(nbytes)
        own = self._records.setdefault(name, _Appended(offset=self._nbytes))
        ranges, completion = list[Range](), Completion()
        transfer = Joined(engine.write(file, self._nbytes, memory), completion)
        hashing.submit(partial(_hash, memory, own.nbytes, ranges, completion))
        own.parts.append(ranges)
        own.nbytes += nbytes
        self._nbytes += nbytes
        while self._transfers and self._transfers[0].done():
            self._transfers.popleft().wait()
        self._transfers.append(transfer)
        return transfer

    def finish(self) -> Contents:
        """Wait for all writes, cut the file to the bytes that were written, begin to make it durable, and return its
        records. Raises OSError."""
        transfers, self._transfers = self._transfers, deque()
        wait_all(transfers)
        if self._file is not None and self._engine is not None:
            if self._reserved_nbytes != self._nbytes:
                os.truncate(self._path, self._nbytes)
            self._transfers.append(self._engine.sync(self._file))
        return Contents(
            capacity_nbytes=self._nbytes,
            weights=(1.0,),
            records=tuple(
                Record(name=name, nbytes=own.nbytes, committed=True, offsets=(own.offset,))
                for name, own in self._records.items()
            ),
            ranges={name: [item for part in own.parts for item in part] for name, own in self._records.items()},
        )

    def wait_durable(self) -> None:
        """Wait until the file is durable, and close it. Call it after `finish`. Raises TransferError."""
        transfers, self._transfers = self._transfers, deque()
        wait_all(transfers)
        self.close()

    def close(self) -> None:
        """Close the file in any state. Nothing may use the memory passed to `append` any more. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._hashing is not None:
            self._hashing.close()
        if self._own_engine and self._engine is not None:
            self._engine.close()

    def _opened(self, nbytes: int) -> tuple[IOEngine, File, Worker]:
        """Return engine, file and hashing thread, opened by the first append, with blocks reserved for `nbytes`
        more."""
        if self._engine is None:
            self._engine = select_engine(self._path.parent).engine
        if self._file is None:
            self._file = self._engine.open(str(self._path), create=True)
        if self._hashing is None:
            self._hashing = Worker("tiered-zero-checkpoint-hash")
        if self._nbytes + nbytes > self._reserved_nbytes:
            self._reserved_nbytes = align_up(max(self._needed_nbytes, self._nbytes + nbytes), PAGE_NBYTES)
            self._file.allocate(self._reserved_nbytes)
        return self._engine, self._file, self._hashing


def _hash(memory: memoryview, start: int, ranges: list[Range], completion: Completion) -> None:
    """Add to `ranges` the ranges of the record's bytes in `memory`, which begin at `start`, with their checksums."""
    try:
        ranges.extend(hashed(cut(Range(start, start + len(memory), 0, None)), memory, start))
    except BaseException as error:  # the transfer carries the error; the thread goes on
        completion.fail(error)
    else:
        completion.complete()
