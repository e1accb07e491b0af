"""Move bytes with the package aiofiles: the engine `aiofiles`, for installations without the native library.

A request is cut into pieces, each of which passes through an event loop to an executor's thread. The engine continues
short transfers and orders syncs after writes.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from tiered_zero.errors import ConfigError, TransferError
from tiered_zero.io.disk import DiskEngine, DiskFile, DiskTransfer, end_of_file_error, transfer_error
from tiered_zero.io.engine import IOSettings, Request

_MAX_BLOCKS_A_CALL = 4

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

    def __init__(self, engine: AiofilesEngine, file: DiskFile, request: Request, num_pieces: int) -> None:
        super().__init__(engine, file, request)
        self._engine = engine
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
        return self.moved_s or self._engine.moved_s

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
class AiofilesEngine(DiskEngine):
    """An event loop on one thread, and an executor on which aiofiles runs each system call.

    Calls have their own offsets, so several pieces of one file are in flight at once. A pool of plain threads wrote 256
    MiB at 1.2 times this engine's rate and read them at 1.0; next to busy Python code at 1.0 and 1.2.
    """

    name = "aiofiles"

    def __init__(self, *, direct: bool, alignment: int, settings: IOSettings, io_timeout_s: float) -> None:
        """Raises ConfigError if the package is not installed, and on platforms without preadv."""
        try:
            aiofiles: Any = importlib.import_module("aiofiles.os")
        except ImportError as error:
            raise ConfigError(f"the package aiofiles cannot be imported ({error})") from error
        if not (hasattr(os, "preadv") and hasattr(os, "pwritev")):
            raise ConfigError("this platform has no preadv and pwritev")
        super().__init__(direct=direct, alignment=alignment, settings=settings, io_timeout_s=io_timeout_s)
        self._call = aiofiles.wrap(_call)
        self.moved_s = time.monotonic()
        self._lock = threading.Lock()
        self._waiting_syncs: list[PieceTransfer] = []
        self._urgent, self._others = deque[IOPiece](), deque[IOPiece]()
        """Pieces that no worker has begun, in the order of arrival; the lock guards both."""
        self._free_workers = asyncio.Semaphore(settings.num_workers)
        self._executor = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="tiered-zero-aiofiles")
        self._ending: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="tiered-zero-aiofiles-loop", daemon=True)
        # the thread does not hold the engine, so an engine without owner and requests is freed, and ends the thread
        weakref.finalize(self, _stop_loop, os.getpid(), self._loop).atexit = False
        try:
            self._thread.start()
        except RuntimeError as error:  # ulimit -u or -v
            self._loop.close()
            raise ConfigError(f"its threads cannot be started: {error}; raise ulimit -u or ulimit -v") from error

    def _start(self, file: DiskFile, request: Request, view: memoryview) -> PieceTransfer:
        num_blocks = -(-request.nbytes // self.settings.block_nbytes)
        step = self.settings.block_nbytes * min(max(num_blocks // 2, 1), _MAX_BLOCKS_A_CALL)
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

    def _end(self, piece: IOPiece, error: BaseException | None) -> None:
        """End a piece, on the loop's thread."""
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

    def _enqueue(self, piece: IOPiece) -> None:
        """Pass a piece to the workers. Never blocks; called under the engine's lock."""
        (self._urgent if piece.transfer.request.urgent else self._others).append(piece)
        asyncio.run_coroutine_threadsafe(self._run_next(), self._loop)

    async def _run_next(self) -> None:
        """Carry out the next piece once a worker is free. Called once per piece."""
        error: BaseException | None = None
        async with self._free_workers:
            with self._lock:
                piece = (self._urgent or self._others).popleft()
            piece.transfer.moved_s = self.moved_s = time.monotonic()
            if piece.transfer.error is None:  # else the request has failed, and the piece only ends
                try:
                    await self._carry_out(piece)
                except BaseException as failure:  # the transfer carries it
                    error = failure
            self._end(piece, error)

    async def _carry_out(self, piece: IOPiece) -> None:
        """Carry out a piece. Raises TransferError, and OSError if a sync fails."""
        request, file, view = piece.transfer.request, piece.transfer.file, piece.view
        if request.kind == "sync":
            await self._call(request, file, view, 0, executor=self._executor)
            return
        progress = Progress(request, file, piece.offset, len(view))
        while not progress.finished:
            start = progress.start
            try:
                moved = await self._call(request, file, view[start:], piece.offset + start, executor=self._executor)
            except OSError as error:
                progress.interrupted(error.errno or 0)
            else:
                progress.advance(moved)
            if progress.pause_s:
                await asyncio.sleep(progress.pause_s)
        file.drop_pages(piece.offset, len(view))

    def _stop(self, idle: bool) -> None:
        """Leave the loop's thread running if requests are stuck: do not join it."""
        self._executor.shutdown(wait=idle, cancel_futures=True)
        with suppress(RuntimeError):  # the loop is closed: a second Ctrl-C interrupted an earlier stop
            self._loop.call_soon_threadsafe(self._end_loop)
        if idle:
            self._thread.join()

    def _end_loop(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._stop_after(asyncio.all_tasks()))

    async def _stop_after(self, pieces: set[asyncio.Task[Any]]) -> None:
        """Stop the loop when every piece has ended. Pieces that no worker has begun end at once, with an error."""
        if pieces:
            await asyncio.wait(pieces)
        self._loop.stop()


def _call(request: Request, file: DiskFile, view: memoryview, offset: int) -> int:
    """Make the system call of a request, on a worker. Return the bytes that it moved. Raises OSError."""
    if request.kind == "sync":
        file.sync()
        return 0
    return (os.preadv if request.kind == "read" else os.pwritev)(file.fd, [view], offset)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop_loop(pid: int, loop: asyncio.AbstractEventLoop) -> None:
    """End the loop of a freed engine, in the process that has its thread. The executor ends its own threads."""
    if os.getpid() == pid and not loop.is_closed():
        with suppress(RuntimeError):  # it was closed meanwhile
            loop.call_soon_threadsafe(loop.stop)


def _as_transfer_error(error: BaseException, request: Request) -> TransferError:
    """Convert an error to a TransferError without traceback, whose frames would keep the request's memory alive."""
    error.__context__ = error.__cause__ = error.__traceback__ = None
    if isinstance(error, TransferError):
        return error
    if request.kind == "sync" and isinstance(error, OSError):
        return transfer_error(request, 0, 0, 0, error.errno or 0)
    return TransferError(f"{request.kind} of {request.path} failed: {type(error).__name__}: {error}")
