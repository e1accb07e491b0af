"""Map a store's address space to one data file per path, in stripes weighted by the speed of the disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

from tiered_zero.errors import StoreError, TieredZeroError
from tiered_zero.io.engine import File, IOEngine, IOTransfer, errno_advice, errno_text, free_text
from tiered_zero.layout.extents import STRIPE_NBYTES, file_nbytes, stripe_cycle
from tiered_zero.record.files import error_text, open_of_owner, sync_directory
from tiered_zero.sizes import format_nbytes

DATA_NAME = "data.bin"

PieceRequest = Callable[[File, int, memoryview], IOTransfer]
"""Starts a transfer of one piece: IOEngine.read or IOEngine.write."""


class StripePiece(NamedTuple):
    """`nbytes` bytes at `file_offset` of the file with index `file_index`."""

    file_index: int
    file_offset: int
    nbytes: int


@final
class Stripes:
    """Maps addresses `[0, capacity_nbytes)` of a store to (file, offset), by arithmetic alone. `weights`: one number >
    0 for each file, in any unit, such as measured bytes/s."""

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or min(weights) <= 0:
            raise StoreError(f"Stripe weights must be one number > 0 for each path; found {list(weights)}.")
        self.weights = tuple(float(weight) for weight in weights)
        self._turn = stripe_cycle(self.weights) if len(weights) > 1 else (0,)
        self._counts = [self._turn.count(index) for index in range(len(weights))]
        self._ranks = [self._turn[:place].count(index) for place, index in enumerate(self._turn)]

    def pieces(self, offset: int, nbytes: int) -> Iterator[StripePiece]:
        """Yield the pieces of `[offset, offset + nbytes)` in order; with one file a single piece."""
        if len(self.weights) == 1:
            yield StripePiece(0, offset, nbytes)
            return
        end = offset + nbytes
        while offset < end:
            stripe, within = divmod(offset, STRIPE_NBYTES)
            length = min(STRIPE_NBYTES - within, end - offset)
            turn, place = divmod(stripe, len(self._turn))
            index = self._turn[place]
            yield StripePiece(index, (turn * self._counts[index] + self._ranks[place]) * STRIPE_NBYTES + within, length)
            offset += length

    def locate(self, paths: Sequence[str | Path], offset: int) -> tuple[str, int]:
        """Return path and file offset of an address, for error texts."""
        piece = next(self.pieces(offset, 1))
        return str(paths[piece.file_index]), piece.file_offset

    def file_nbytes(self, capacity_nbytes: int) -> list[int]:
        """Return the bytes of each file; their sum is exactly the capacity."""
        return file_nbytes(capacity_nbytes, self.weights)


@final
class StripedFiles:
    """The open data files of a store. Any thread may use them; requests are not ordered."""

    def __init__(self, engine: IOEngine, files: Sequence[File], stripes: Stripes) -> None:
        self.engine = engine
        self._files = tuple(files)
        self.stripes = stripes

    @classmethod
    def create(cls, engine: IOEngine, paths: Sequence[Path], stripes: Stripes, capacity_nbytes: int) -> StripedFiles:
        """Create and preallocate the files. Raises StoreError, and leaves no file behind, if the disk is too small."""
        made = cls(engine, (), stripes)
        for name, nbytes in zip(paths, stripes.file_nbytes(capacity_nbytes), strict=True):
            try:
                file = engine.open(str(name), create=True)
                made._files += (file,)
                if nbytes:
                    file.allocate(nbytes)
                sync_directory(name.parent)
            except (TieredZeroError, OSError) as error:
                made.close()
                for left in paths:
                    left.unlink(missing_ok=True)
                code = error.errno if isinstance(error, OSError) else None
                remedy = (
                    f"Free space (`tiered-zero swap gc {name.parent.parent}` removes what killed runs have left), name "
                    "another nvme_path, or put less on NVMe."
                )
                raise StoreError(
                    f"The swap file {name} needs {format_nbytes(nbytes)} ({nbytes} bytes); {free_text(str(name))} "
                    f"({errno_text(code) if code else error}). "
                    f"{remedy if code in (None, errno.ENOSPC) else errno_advice(code)}"
                ) from error
        return made

    @classmethod
    def open(cls, engine: IOEngine, paths: Sequence[Path], stripes: Stripes, *, writable: bool = True) -> StripedFiles:
        """Open existing files. Raises TransferError."""
        opened = cls(engine, (), stripes)
        try:
            for path in paths:
                opened._files += (engine.open(str(path), writable=writable),)
        except Exception:
            opened.close()
            raise
        return opened

    def grow(self, capacity_nbytes: int) -> None:
        """Reserve disk space for a larger capacity. Raises StoreError, with nothing changed, if the disk is too
        small."""
        for file, nbytes in zip(self._files, self.stripes.file_nbytes(capacity_nbytes), strict=True):
            try:
                file.allocate(nbytes)
            except (TieredZeroError, OSError) as error:
                raise StoreError(
                    f"The swap file {file.path} must grow to {format_nbytes(nbytes)} ({nbytes} bytes), for what is "
                    f"written once is changed, and the last commit holds it; {free_text(file.path)} ({error}). Free "
                    "space there."
                ) from error

    def locate(self, offset: int) -> tuple[str, int]:
        """Return path and file offset of an address, for error texts."""
        return self.stripes.locate([file.path for file in self._files], offset)

    def submit(self, request: PieceRequest, offset: int, memory: memoryview, transfers: list[IOTransfer]) -> None:
        """Start the transfers of `memory`, which lies at `offset` of the store, one for each piece. `request`:
        IOEngine.read or IOEngine.write. `transfers`: a list that receives them one by one, even if a later one is
        refused."""
        start = 0
        for index, at, nbytes in self.stripes.pieces(offset, len(memory)):
            transfers.append(request(self._files[index], at, memory[start : start + nbytes]))
            start += nbytes

    def sync(self) -> list[IOTransfer]:
        """Start to sync every file, and return the transfers."""
        return [self.engine.sync(file) for file in self._files]

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = ()


def check_data_files(paths: Sequence[Path], stripes: Stripes, capacity_nbytes: int) -> None:
    """Raise StoreError if a data file is missing, too short, or not the directory owner's file, or if there are more or
    fewer paths than stripes."""
    if len(paths) != len(stripes.weights):
        raise StoreError(f"{paths[0]}: the state is striped over {len(stripes.weights)} paths; found {len(paths)}.")
    for path, nbytes in zip(paths, stripes.file_nbytes(capacity_nbytes), strict=True):
        if fault := _fault(path / DATA_NAME, nbytes):
            raise StoreError(
                f"The swap file {path / DATA_NAME} of {nbytes} bytes {fault}; its state cannot be recovered."
            )


def _fault(name: Path, nbytes: int) -> str:
    """Return a text that says what is wrong with a data file, which must have `nbytes` bytes; "" if nothing."""
    try:
        with open_of_owner(name) as fd:
            with suppress(OSError):  # drop cached pages, so that reads come from the disk
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(fd).st_size
    except FileNotFoundError:
        return "is missing"
    except (OSError, StoreError) as error:
        return f"cannot be opened ({error_text(error)})"
    return f"is cut off at {size} bytes" if size < nbytes else ""
