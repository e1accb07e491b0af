"""Data files of a tag, appended through an I/O engine with a checksum for each MiB. data_reader.py reads them.

The caller's memory goes to the file without a copy, several MiB at a time, while a thread computes checksums
(hashing.py). Blocks are reserved when a file is made, so that a full disk is an error early, and so that direct writes
need not change the file's size, which Linux does one at a time.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, final

from tiered_zero.checkpoint.hashing import FileHash, Hasher
from tiered_zero.checkpoint.tag_manifest import DataFile
from tiered_zero.errors import InternalError
from tiered_zero.io.disk_file import memory_address
from tiered_zero.io.engine import File, IOEngine
from tiered_zero.io.select import select_engine
from tiered_zero.mappings import map_memory
from tiered_zero.sizes import GIB, MIB, PAGE_NBYTES, align_up
from tiered_zero.transfer import Transfer, wait_all

BUFFER_NBYTES: Final = 2 * MIB
NUM_BUFFERS: Final = 12
"""Of a writer's staging memory, and of a reader's: 24 MiB, most of which are on their way at any time. A load took 11%
longer with 8, and 9% with 16, which is more than a processor keeps near."""

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
@dataclass(eq=False, kw_only=True)
class _OpenFile:
    """A data file that is being written. `nbytes`: appended so far; `reserved_nbytes`: blocks that it has."""

    name: str
    file: File
    nbytes: int = 0
    reserved_nbytes: int = 0
    hash: FileHash = field(default_factory=FileHash)


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
        self._is_patient = False
        self._hasher: Hasher | None = None

    @property
    def nbytes(self) -> int:
        """Appended so far, in all files."""
        return sum(file.nbytes for file in self._files)

    def yield_to_training(self) -> None:
        """Take what training leaves of the processors, until `hurry`. Before the first `append`."""
        self._is_patient = True

    def hurry(self) -> None:
        """Yield no longer: something waits for what is written. Any thread; idempotent."""
        self._is_patient = False
        if self._hasher is not None:
            self._hasher.hurry()

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
        if self._hasher is None:
            self._hasher = Hasher(is_patient=self._is_patient)
            if not self._is_patient:  # `hurry` may have come before there was a hasher
                self._hasher.hurry()
        file = self._file_for(self._engine, nbytes)
        offset = file.nbytes
        file.nbytes += nbytes
        self._left_nbytes = max(0, self._left_nbytes - nbytes)
        written = self._engine.write(file.file, offset, memory)
        transfer = _Joined(written, self._hasher.submit(file.hash, memory))
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
            file.hash.end()
            finished.append(DataFile(name=file.name, nbytes=file.nbytes, digests=tuple(file.hash.digests)))
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
        if self._hasher is not None:
            self._hasher.close()
        if self._own_engine and self._engine is not None:
            self._engine.close()

    def _file_for(self, engine: IOEngine, nbytes: int) -> _OpenFile:
        """The file that takes the next `nbytes`, with blocks for them."""
        if not self._files or self._files[-1].nbytes + nbytes > max(_MOST_FILE_NBYTES, nbytes):
            name = f"{self._prefix}-{len(self._files):05d}.bin"
            self._files.append(_OpenFile(name=name, file=engine.open(str(self._directory / name), create=True)))
        file = self._files[-1]
        if file.nbytes + nbytes > file.reserved_nbytes:
            ahead_nbytes = min(self._left_nbytes, _MOST_FILE_NBYTES - file.nbytes)
            reserved_nbytes = align_up(file.nbytes + max(ahead_nbytes, nbytes), PAGE_NBYTES)
            file.file.allocate(reserved_nbytes)
            file.reserved_nbytes = reserved_nbytes
        return file
