"""Cut requests into pieces, continue short transfers, and order syncs after writes, for the two Python engines."""

from __future__ import annotations

import errno
import threading
import time
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import final

from tiered_zero.errors import TransferError
from tiered_zero.io.disk import DiskEngine, DiskFile, DiskTransfer, end_of_file_error, transfer_error
from tiered_zero.io.engine import IOSettings, Request

_MAX_TRIES = 16
"""Tries without progress before a transfer fails; together they last about a second."""


@final
class Progress:
    """The progress of one piece. Raises TransferError when no further try is due.

    A short transfer is continued. With O_DIRECT the next one must start aligned: after an unaligned end it starts from
    the last aligned offset before it.
    """

    def __init__(self, request: Request, file: DiskFile, offset: int, nbytes: int) -> None:
        self._request, self._file = request, file
        self._offset, self._nbytes = offset, nbytes
        self._done = 0
        self._num_tries = 0

    @property
    def start(self) -> int:
        """The byte of the piece at which the next transfer starts."""
        return self._done - self._done % self._file.alignment

    @property
    def finished(self) -> bool:
        return self._done >= self._nbytes

    def advance(self, moved: int) -> None:
        """Note that a transfer from `start` moved `moved` bytes. Raises TransferError."""
        end = self.start + moved
        if end > self._done:
            self._done, self._num_tries = end, 0
            return
        if self._request.kind == "read":
            file_nbytes = self._file.size_nbytes()
            if self._offset + self._done >= file_nbytes:
                raise end_of_file_error(self._request, self._offset, self._nbytes, self._done, file_nbytes)
        self._try_again(errno.EIO)

    def interrupted(self, code: int) -> None:
        """Note that a transfer failed with errno `code`. Raises TransferError unless it can be tried again."""
        if code not in (errno.EINTR, errno.EAGAIN):
            raise self._error(code)
        self._try_again(code)

    def _try_again(self, code: int) -> None:
        self._num_tries += 1
        if self._num_tries >= _MAX_TRIES:
            raise self._error(code)

    @property
    def pause_s(self) -> float:
        """Seconds to sleep before the next transfer: 0 after progress, then 1 ms, doubled with each try up to 0.1 s."""
        return min(0.001 * 2 ** (self._num_tries - 1), 0.1) if self._num_tries else 0.0

    def _error(self, code: int) -> TransferError:
        return transfer_error(self._request, self._offset, self._nbytes, self._done, code)


@final
class PieceTransfer(DiskTransfer):
    """A request that is finished with its last piece. The engine's lock guards `num_left`, `blockers` and `error`."""

    def __init__(self, engine: PieceEngine, file: DiskFile, request: Request, num_pieces: int) -> None:
        super().__init__(engine, file, request)
        self._pool = engine
        self.num_left = num_pieces
        self.blockers: set[PieceTransfer] = set()
        """For a sync: the writes for which it waits."""
        self.moved_s = 0.0
        """time.monotonic() when a piece last started or ended; 0.0 while all are queued."""
        self._seconds = 0.0
        self._event = threading.Event()

    def done(self) -> bool:
        return self._event.is_set()

    def finished_within(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def progressed_s(self) -> float:
        return self.moved_s or self._pool.moved_s

    def finish(self) -> None:
        self._seconds = max(time.monotonic() - self.submitted_s, 1e-9)
        self._event.set()

    @property
    def seconds(self) -> float:
        return self._seconds


@dataclass(frozen=True, slots=True)
class IOPiece:
    """A part of a request that one worker carries out. A sync is one piece without bytes."""

    transfer: PieceTransfer
    offset: int
    view: memoryview


@final
class PieceQueue:
    """Pieces that no worker has taken: urgent ones first, else in the order of arrival. The caller locks it."""

    def __init__(self) -> None:
        self._urgent: deque[IOPiece] = deque()
        self._others: deque[IOPiece] = deque()

    def put(self, piece: IOPiece) -> None:
        (self._urgent if piece.transfer.request.urgent else self._others).append(piece)

    def take(self) -> IOPiece:
        return (self._urgent or self._others).popleft()


class PieceEngine(DiskEngine):
    """Cuts requests into pieces. The subclass has workers that carry out each piece between `begin` and `end`."""

    def __init__(self, *, direct: bool, alignment: int, settings: IOSettings, io_timeout_s: float) -> None:
        super().__init__(direct=direct, alignment=alignment, settings=settings, io_timeout_s=io_timeout_s)
        self.moved_s = time.monotonic()
        self._lock = threading.Lock()
        self._waiting_syncs: list[PieceTransfer] = []

    @abstractmethod
    def _piece_nbytes(self, nbytes: int) -> int:
        """Return the size of the pieces of a request of `nbytes`: a whole number of blocks."""

    @abstractmethod
    def _enqueue(self, piece: IOPiece) -> None:
        """Pass a piece to the workers. Never blocks; called under the engine's lock."""

    def _start(self, file: DiskFile, request: Request, view: memoryview) -> PieceTransfer:
        step = self._piece_nbytes(request.nbytes)
        starts = range(0, request.nbytes, step)
        is_sync = request.kind == "sync"
        transfer = PieceTransfer(self, file, request, num_pieces=1 if is_sync else len(starts))
        with self._lock:
            self.latch.check()  # again: after a failed write a sync must not succeed
            if is_sync:
                transfer.blockers = {
                    earlier
                    for earlier in list(self._unfinished)
                    if isinstance(earlier, PieceTransfer) and earlier.file is file and earlier.request.kind == "write"
                }
            if not transfer.num_left:
                transfer.finish()
                return transfer
            self._unfinished[transfer] = None
            if transfer.blockers:
                self._waiting_syncs.append(transfer)
            elif is_sync:
                self._enqueue(IOPiece(transfer, 0, view))
            for start in starts:
                self._enqueue(IOPiece(transfer, request.offset + start, view[start : start + step]))
        return transfer

    def begin(self, piece: IOPiece) -> bool:
        """Start a piece, on a worker. Return False if its request has failed: then only `end` remains to be called."""
        piece.transfer.moved_s = self.moved_s = time.monotonic()
        return piece.transfer.error is None

    def end(self, piece: IOPiece, error: BaseException | None) -> None:
        """End a piece, on a worker."""
        transfer = piece.transfer
        transfer.moved_s = self.moved_s = time.monotonic()
        failure = _as_transfer_error(error, transfer.request) if error is not None else None
        with self._lock:
            if failure is not None and transfer.error is None:
                transfer.error = failure
                self.latch.set(failure)
            transfer.num_left -= 1
            if transfer.num_left == 0:
                self._finish(transfer)

    def _finish(self, transfer: PieceTransfer) -> None:
        self._unfinished.pop(transfer)
        transfer.finish()
        for sync in [waiting for waiting in self._waiting_syncs if transfer in waiting.blockers]:
            sync.blockers.remove(transfer)
            sync.error = sync.error or transfer.error  # a write that failed cannot be made durable
            if not sync.blockers:
                self._waiting_syncs.remove(sync)
                self._enqueue(IOPiece(sync, 0, memoryview(b"")))


def _as_transfer_error(error: BaseException, request: Request) -> TransferError:
    """Convert an error to a TransferError without traceback, whose frames would keep the request's memory alive."""
    error.__context__ = error.__cause__ = error.__traceback__ = None
    if isinstance(error, TransferError):
        return error
    if request.kind == "sync" and isinstance(error, OSError):
        return transfer_error(request, 0, 0, 0, error.errno or 0)
    return TransferError(f"{request.kind} of {request.path} failed: {type(error).__name__}: {error}")
