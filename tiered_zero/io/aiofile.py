"""The engine `aiofiles`: the package of that name, for platforms that offer nothing better."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, final

from tiered_zero.errors import ConfigError
from tiered_zero.io.disk_file import DiskFile
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.pieces import IOPiece, PieceEngine, PieceQueue, Progress


@final
class AiofilesEngine(PieceEngine):
    """An event loop on one thread, and aiofiles' executor. Needs of the platform only seek, read and write.

    These share the file's position, so that one transfer is on its way in each file: it is made large instead.
    """

    name = "aiofiles"

    def __init__(self, *, direct: bool, alignment: int, settings: IOSettings, io_timeout_s: float) -> None:
        """Raises ConfigError if the package is not installed."""
        try:
            self._aiofiles: Any = importlib.import_module("aiofiles")
        except ImportError as error:
            raise ConfigError(f"the package aiofiles cannot be imported ({error})") from error
        super().__init__(direct=direct, alignment=alignment, settings=settings, io_timeout_s=io_timeout_s)
        self._queues: dict[DiskFile, PieceQueue] = {}  # under the engine's lock
        self._locks: dict[DiskFile, asyncio.Lock] = {}
        self._handles: dict[DiskFile, Any] = {}
        self._executor = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="tiered-zero-aiofiles")
        self._ending: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="tiered-zero-aiofiles-loop", daemon=True)
        # the thread does not hold the engine: one without an owner ends it, once no request holds it
        weakref.finalize(self, _stop_loop, os.getpid(), self._loop).atexit = False
        self._thread.start()

    def _piece_nbytes(self, nbytes: int) -> int:
        return self.settings.block_nbytes * self.settings.queue_depth

    def _enqueue(self, piece: IOPiece) -> None:
        self._queues.setdefault(piece.transfer.file, PieceQueue()).put(piece)
        asyncio.run_coroutine_threadsafe(self._run_next(piece.transfer.file), self._loop)

    async def _run_next(self, file: DiskFile) -> None:
        """The file's next piece: called once for each."""
        error: BaseException | None = None
        async with self._locks.setdefault(file, asyncio.Lock()):
            with self._lock:
                piece = self._queues[file].take()
            if self.begin(piece):
                try:
                    await self._carry_out(piece)
                except BaseException as failure:  # it belongs to the transfer
                    error = failure
            self.end(piece, error)

    async def _handle(self, file: DiskFile) -> Any:
        if file not in self._handles:
            opening = self._aiofiles.open(file.fd, "rb+", buffering=0, closefd=False, executor=self._executor)
            self._handles[file] = await opening
        return self._handles[file]

    async def _carry_out(self, piece: IOPiece) -> None:
        """Raises TransferError, and OSError where a sync fails."""
        request, file, view = piece.transfer.request, piece.transfer.file, piece.view
        if request.kind == "sync":
            await self._loop.run_in_executor(self._executor, file.sync)
            return
        handle = await self._handle(file)
        transfer = handle.readinto if request.kind == "read" else handle.write
        progress = Progress(request, file, piece.offset, len(view))
        while not progress.finished:
            start = progress.start
            try:
                await handle.seek(piece.offset + start)
                moved = await transfer(view[start:])
            except OSError as error:
                progress.interrupted(error.errno or 0)
            else:
                progress.advance(moved or 0)  # a raw file says None if it would block
            if progress.pause_s:
                await asyncio.sleep(progress.pause_s)
        file.drop_pages(piece.offset, len(view))

    def _drain(self, file: DiskFile | None = None) -> bool:
        drained = super()._drain(file)
        if drained and file is not None:
            self._queues.pop(file, None)
            self._locks.pop(file, None)
            self._handles.pop(file, None)
        return drained

    def _stop(self, idle: bool) -> None:
        """Where requests are stuck, the loop's thread waits for them, and nothing waits for it."""
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
