"""The engine `aiofiles`: the package of that name, for installations without the native library.

A request is cut into pieces, and each runs one `preadv` or `pwritev` at a time on a thread of an executor, as aiofiles
runs every call of a file. So several pieces of one file are under way at once: a call has its own offset, and no
position of the file to share. Where Python code computes beside it each piece waits for the GIL, so that the native
engine is preferred.
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

_MAX_TRIES = 16
"""Tries without a byte moved before a transfer fails: they last about a second in all."""

_MAX_BLOCKS_A_CALL = 4


@final
class Progress:
    """Progress of one piece, and whether another try is due. Raises TransferError if none is.

    A transfer that ends short is continued. With O_DIRECT the next one must start aligned, so that a short transfer
    with an unaligned end is issued again from the last aligned offset before it.
    """

    def __init__(self, request: Request, file: DiskFile, offset: int, nbytes: int) -> None:
        self._request, self._file = request, file
        self._offset, self._nbytes = offset, nbytes
        self._done = 0
        self._num_tries = 0

    @property
    def start(self) -> int:
        """Bytes into the piece at which the next transfer starts."""
        return self._done - self._done % self._file.alignment

    @property
    def finished(self) -> bool:
        return self._done >= self._nbytes

    def advance(self, moved: int) -> None:
        """A transfer from `start` moved this many bytes."""
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
        """A transfer raised errno `code`."""
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
class AiofilesTransfer(DiskTransfer):
    """Finished when its last piece is. `num_left`, `blockers` and `error` are guarded by the engine's lock."""

    def __init__(self, engine: AiofilesEngine, file: DiskFile, request: Request, num_pieces: int) -> None:
        super().__init__(engine, file, request)
        self._pool = engine
        self.num_left = num_pieces
        self.blockers: set[DiskTransfer] = set()
        """Of a sync: the writes that it waits for."""
        self.moved_s = 0.0
        """time.monotonic() at which a piece last started or ended; 0.0 while all are queued."""
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
    """The work of one worker at a time. A sync is one piece without bytes."""

    transfer: AiofilesTransfer
    offset: int
    view: memoryview


@final
class PieceQueue:
    """Pieces that no worker has taken yet: the urgent ones, then the others, both in the order in which they came. The
    caller sees to it that one thread at a time is in it."""

    def __init__(self) -> None:
        self._urgent: deque[IOPiece] = deque()
        self._others: deque[IOPiece] = deque()

    def put(self, piece: IOPiece) -> None:
        (self._urgent if piece.transfer.request.urgent else self._others).append(piece)

    def take(self) -> IOPiece:
        return (self._urgent or self._others).popleft()


@final
class AiofilesEngine(DiskEngine):
    """One queue for all requests and files: whichever worker is free takes the next piece, so that the device's queue
    does not drain at the end of a request or a file. An event loop on a thread of its own hands pieces to the workers.
    """

    name = "aiofiles"

    def __init__(self, *, direct: bool, alignment: int, settings: IOSettings, io_timeout_s: float) -> None:
        """Raises ConfigError if the package is not installed, the platform has no preadv, or threads are refused."""
        super().__init__(direct=direct, alignment=alignment, settings=settings, io_timeout_s=io_timeout_s)
        try:
            aiofiles: Any = importlib.import_module("aiofiles.os")
        except ImportError as error:
            raise ConfigError(f"the package aiofiles cannot be imported ({error})") from error
        if not (hasattr(os, "preadv") and hasattr(os, "pwritev")):
            raise ConfigError("this platform has no preadv and pwritev")
        self._call = aiofiles.wrap(_call)
        self.moved_s = time.monotonic()
        self._lock = threading.Lock()
        self._queue = PieceQueue()  # under the lock
        self._waiting_syncs: list[AiofilesTransfer] = []
        self._free_workers = asyncio.Semaphore(settings.num_workers)
        self._ending: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="tiered-zero-aiofiles")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="tiered-zero-aiofiles-loop", daemon=True)
        # the thread does not hold the engine: one without an owner ends it, once no request holds it
        weakref.finalize(self, _stop_loop, os.getpid(), self._loop).atexit = False
        try:
            _start_workers(self._executor, settings.num_workers)
            self._thread.start()
        except RuntimeError as error:  # ulimit -u or -v
            self._loop.close()
            self._executor.shutdown()
            raise ConfigError(
                f"its {settings.num_workers} threads cannot be started: {error}; raise ulimit -u or ulimit -v"
            ) from error

    def _start(self, file: DiskFile, request: Request, view: memoryview) -> AiofilesTransfer:
        step = self._piece_nbytes(request.nbytes)
        starts = range(0, request.nbytes, step)
        is_sync = request.kind == "sync"
        transfer = AiofilesTransfer(self, file, request, num_pieces=1 if is_sync else len(starts))
        with self._lock:
            self.latch.check()  # again: a write that has failed since cannot be made durable
            if is_sync:
                writes = (earlier for earlier in self._unfinished if earlier.request.kind == "write")
                transfer.blockers = {earlier for earlier in writes if earlier.file is file}
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

    def _piece_nbytes(self, nbytes: int) -> int:
        """Return the size of the pieces of a request of `nbytes`: a whole number of blocks."""
        block_nbytes = self.settings.block_nbytes
        num_blocks = -(-nbytes // block_nbytes)
        return block_nbytes * min(max(num_blocks // self.settings.num_workers, 1), _MAX_BLOCKS_A_CALL)

    def _enqueue(self, piece: IOPiece) -> None:
        """Pass a piece to the workers. Under the lock."""
        self._queue.put(piece)
        asyncio.run_coroutine_threadsafe(self._run_next(), self._loop)

    async def _run_next(self) -> None:
        """Carry out the next piece once a worker is free: called once for each. On the loop's thread."""
        async with self._free_workers:
            with self._lock:
                piece = self._queue.take()
            piece.transfer.moved_s = self.moved_s = time.monotonic()
            failure: TransferError | None = None
            if piece.transfer.error is None:  # else its request has failed already
                try:
                    await self._carry_out(piece)
                except BaseException as error:  # whatever it is, it belongs to the transfer
                    failure = _as_transfer_error(error, piece.transfer.request)
            self._end(piece, failure)

    async def _carry_out(self, piece: IOPiece) -> None:
        """Raises TransferError, and OSError where a sync fails."""
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

    def _end(self, piece: IOPiece, failure: TransferError | None) -> None:
        transfer = piece.transfer
        transfer.moved_s = self.moved_s = time.monotonic()
        with self._lock:
            if failure is not None and transfer.error is None:
                transfer.error = failure
                self.latch.set(failure)
            transfer.num_left -= 1
            if transfer.num_left == 0:
                self._finish(transfer)

    def _finish(self, transfer: AiofilesTransfer) -> None:
        self._unfinished.pop(transfer)
        transfer.finish()
        for sync in [waiting for waiting in self._waiting_syncs if transfer in waiting.blockers]:
            sync.blockers.remove(transfer)
            sync.error = sync.error or transfer.error  # what was not written cannot be made durable
            if not sync.blockers:
                self._waiting_syncs.remove(sync)
                self._enqueue(IOPiece(sync, 0, memoryview(b"")))

    def _stop(self, idle: bool) -> None:
        """Leave the loop's thread running if requests are stuck: do not join it."""
        self._executor.shutdown(wait=idle, cancel_futures=True)
        with suppress(RuntimeError):  # the loop is closed, by a stop that a second Ctrl-C broke off
            self._loop.call_soon_threadsafe(self._end_loop)
        if idle:
            self._thread.join()

    def _end_loop(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._stop_after(asyncio.all_tasks()))

    async def _stop_after(self, pieces: set[asyncio.Task[Any]]) -> None:
        """Stop the loop when every piece has ended; those that no worker has begun end at once, with an error."""
        if pieces:
            await asyncio.wait(pieces)
        self._loop.stop()


def _call(request: Request, file: DiskFile, view: memoryview, offset: int) -> int:
    """Make the system call of a request, on a worker. Return the bytes that it moved. Raises OSError."""
    if request.kind == "sync":
        file.sync()
        return 0
    return (os.preadv if request.kind == "read" else os.pwritev)(file.fd, [view], offset)


def _start_workers(executor: ThreadPoolExecutor, num_workers: int) -> None:
    """Start every thread of the executor, which would start one when a call needs it. Raises RuntimeError."""
    gate = threading.Event()
    try:
        for _ in range(num_workers):
            executor.submit(gate.wait)
    finally:
        gate.set()


def _as_transfer_error(error: BaseException, request: Request) -> TransferError:
    """As a TransferError without a traceback: its frames would keep the request's memory alive."""
    error.__context__ = error.__cause__ = error.__traceback__ = None
    if isinstance(error, TransferError):
        return error
    if request.kind == "sync" and isinstance(error, OSError):
        return transfer_error(request, 0, 0, 0, error.errno or 0)
    return TransferError(f"{request.kind} of {request.path} failed: {type(error).__name__}: {error}")


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop_loop(pid: int, loop: asyncio.AbstractEventLoop) -> None:
    """End the loop of an engine that is no more, in the process that has its thread. The executor ends its own."""
    if os.getpid() == pid and not loop.is_closed():
        with suppress(RuntimeError):  # it is closed now
            loop.call_soon_threadsafe(loop.stop)
