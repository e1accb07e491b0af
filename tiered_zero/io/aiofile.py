"""Move bytes with the package aiofiles: the engine `aiofiles`, for installations without the native library. A
coroutine cuts each request into parts. An executor's threads make the system calls for the parts."""

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
from typing import Any, final

from tiered_zero.errors import ConfigError, TransferError
from tiered_zero.io.engine import (
    File,
    IOEngine,
    IOSettings,
    IOTransfer,
    Request,
    end_of_file_error,
    transfer_error,
)

_MAX_BLOCKS_A_CALL = 4  # more than one, to take the GIL less often

_MAX_TRIES = 16
"""The number of tries without progress before a transfer fails. All of them together take about a second."""


@final
class AiofilesTransfer(IOTransfer):
    """A request that runs as a coroutine on the engine's event loop."""

    def __init__(self, engine: AiofilesEngine, file: File, request: Request) -> None:
        super().__init__(engine, file, request)
        self._engine = engine
        self.moved_s = 0.0
        """time.monotonic() when a part of the request last started or ended; 0.0 while all parts are queued."""
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


@final
class AiofilesEngine(IOEngine):
    """Runs an event loop on one thread, and an executor whose threads make aiofiles' system calls."""

    name = "aiofiles"

    def __init__(self, *, direct: bool, settings: IOSettings, io_timeout_s: float) -> None:
        """Start the event loop's thread. Raises ConfigError if the thread cannot start or aiofiles cannot be
        imported."""
        try:
            aiofiles: Any = importlib.import_module("aiofiles.os")
        except ImportError as error:
            raise ConfigError(f"the package aiofiles cannot be imported ({error})") from error
        super().__init__(direct=direct, settings=settings, io_timeout_s=io_timeout_s)
        self._call = aiofiles.wrap(_call)
        self.moved_s = time.monotonic()
        self._num_free = settings.num_workers
        self._urgent, self._others = deque[asyncio.Future[None]](), deque[asyncio.Future[None]]()
        """Futures of the request parts that wait for a worker: of urgent parts, and of all others. Each queue is in the
        order of arrival. Only the loop's thread uses them."""
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

    def _start(self, file: File, request: Request, view: memoryview) -> AiofilesTransfer:
        transfer = AiofilesTransfer(self, file, request)
        self._unfinished[transfer] = None
        asyncio.run_coroutine_threadsafe(self._run(transfer, view), self._loop)
        return transfer

    async def _run(self, transfer: AiofilesTransfer, view: memoryview) -> None:
        if transfer.request.kind == "sync":
            await self._carry_out(transfer, 0, view)
        else:
            num_blocks = -(-len(view) // self.settings.block_nbytes)
            step = self.settings.block_nbytes * min(max(num_blocks // 2, 1), _MAX_BLOCKS_A_CALL)
            parts = [self._carry_out(transfer, at, view[at : at + step]) for at in range(0, len(view), step)]
            await asyncio.gather(*parts)
        self._unfinished.pop(transfer)
        transfer.finish()

    async def _carry_out(self, transfer: AiofilesTransfer, start: int, view: memoryview) -> None:
        """Carry out one part of a request, once a worker is free. `view`: the part's memory. `start`: the part's first
        byte in the request. An error is stored in the transfer."""
        request = transfer.request
        await self._take_worker(request.urgent)
        transfer.moved_s = self.moved_s = time.monotonic()
        try:
            if transfer.error is None:  # else another part has failed
                await self._move(request, transfer.file, request.offset + start, view)
        except BaseException as error:
            failure = _as_transfer_error(error, request)
            transfer.error = transfer.error or failure
            self.latch.set(failure)
        transfer.moved_s = self.moved_s = time.monotonic()
        self._free_worker()

    async def _take_worker(self, urgent: bool) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = self._loop.create_future()
        (self._urgent if urgent else self._others).append(turn)
        await turn

    def _free_worker(self) -> None:
        """Pass the worker to the part of a request that has waited longest; urgent parts come first. If no part waits,
        mark the worker as free."""
        if waiting := self._urgent or self._others:
            waiting.popleft().set_result(None)
        else:
            self._num_free += 1

    async def _move(self, request: Request, file: File, offset: int, view: memoryview) -> None:
        """Make the system calls for a part of the request, until all bytes of `view` are moved. Raises TransferError,
        and OSError if a sync fails."""
        if request.kind == "sync":
            await self._call(request, file, view, 0, executor=self._executor)
            return
        done = num_tries = 0
        while done < len(view):
            start, code = done - done % file.alignment, 0  # O_DIRECT must start aligned, also after an unaligned end
            try:
                moved = await self._call(request, file, view[start:], offset + start, executor=self._executor)
            except OSError as error:
                moved, code = 0, error.errno or 0
            if start + moved > done:
                done, num_tries = start + moved, 0
                continue
            if not code and request.kind == "read" and offset + done >= (file_nbytes := file.size_nbytes()):
                raise end_of_file_error(request, offset, len(view), done, file_nbytes)
            num_tries += 1
            if num_tries == _MAX_TRIES or code not in (0, errno.EINTR, errno.EAGAIN):
                raise transfer_error(request, offset, len(view), done, code or errno.EIO)
            await asyncio.sleep(min(0.001 * 2 ** (num_tries - 1), 0.1))
        file.drop_pages(offset, len(view))

    def _stop(self, idle: bool) -> None:
        """End the executor and the loop. `idle`: True if no request is stuck; then also wait until the threads end."""
        self._executor.shutdown(wait=idle, cancel_futures=True)
        with suppress(RuntimeError):  # the loop is closed: a second Ctrl-C interrupted an earlier stop
            self._loop.call_soon_threadsafe(self._end_loop)
        if idle:
            self._thread.join()

    def _end_loop(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._stop_after(asyncio.all_tasks()))

    async def _stop_after(self, requests: set[asyncio.Task[Any]]) -> None:
        """Stop the loop when every request has ended."""
        if requests:
            await asyncio.wait(requests)
        self._loop.stop()


def _call(request: Request, file: File, view: memoryview, offset: int) -> int:
    """Make the system call of a request, on a worker. Return the number of bytes moved. Raises OSError."""
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
    """Stop the event loop of an I/O engine that was freed. `pid`: the process that made the loop. Do nothing in a
    forked child."""
    if os.getpid() == pid and not loop.is_closed():
        with suppress(RuntimeError):  # another thread closed it just now
            loop.call_soon_threadsafe(loop.stop)


def _as_transfer_error(error: BaseException, request: Request) -> TransferError:
    """Convert an error to a TransferError without a traceback."""
    # the frames of a traceback would keep the request's memory alive
    error.__context__ = error.__cause__ = error.__traceback__ = None
    if isinstance(error, TransferError):
        return error
    if request.kind == "sync" and isinstance(error, OSError):
        return transfer_error(request, 0, 0, 0, error.errno or 0)
    return TransferError(f"{request.kind} of {request.path} failed: {type(error).__name__}: {error}")
