"""Move bytes with preadv and pwritev on a small pool of Python threads: the engine `threads`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from tiered_zero.errors import ConfigError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.pieces import IOPiece, PieceEngine, PieceQueue, Progress

_MAX_BLOCKS_A_CALL = 4


@final
class ThreadsEngine(PieceEngine):
    """One queue for all requests and files: any free worker takes the next piece, so the device's queue does not drain
    at the end of a request or file. Needs no compiler. Every call takes the GIL: while Python code computes, prefer the
    native engine."""

    name = "threads"

    def __init__(self, *, direct: bool, alignment: int, settings: IOSettings, io_timeout_s: float) -> None:
        """Raises ConfigError on platforms without preadv."""
        if not (hasattr(os, "preadv") and hasattr(os, "pwritev")):
            raise ConfigError("this platform has no preadv and pwritev")
        super().__init__(direct=direct, alignment=alignment, settings=settings, io_timeout_s=io_timeout_s)
        self._queue = PieceQueue()  # under the engine's lock
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # one per piece, None to end a worker
        # the workers do not hold the engine, so an engine without owner is freed, and ends them
        weakref.finalize(self, _end_workers, self._calls, settings.num_workers).atexit = False
        self._workers = [
            threading.Thread(target=_work, args=(self._calls,), name=f"tiered-zero-io-{index}", daemon=True)
            for index in range(settings.num_workers)
        ]
        try:
            for worker in self._workers:
                worker.start()
        except RuntimeError as error:  # ulimit -u or -v
            _end_workers(self._calls, len(self._workers))
            raise ConfigError(
                f"its {settings.num_workers} threads cannot be started: {error}; raise ulimit -u or ulimit -v"
            ) from error

    def _piece_nbytes(self, nbytes: int) -> int:
        block_nbytes = self.settings.block_nbytes
        num_blocks = -(-nbytes // block_nbytes)
        return block_nbytes * min(max(num_blocks // self.settings.num_workers, 1), _MAX_BLOCKS_A_CALL)

    def _enqueue(self, piece: IOPiece) -> None:
        self._queue.put(piece)
        self._calls.put(self._run)

    def _run(self) -> None:
        with self._lock:
            piece = self._queue.take()
        error: BaseException | None = None
        if self.begin(piece):
            try:
                _carry_out(piece)
            except BaseException as failure:  # the transfer carries it; it must not end the worker
                error = failure
        self.end(piece, error)

    def _stop(self, idle: bool) -> None:
        _end_workers(self._calls, len(self._workers))
        for worker in self._workers if idle else ():
            worker.join()


def _work(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := calls.get()) is not None:
        run()  # no name here keeps a finished piece, and its memory, alive
        del run


def _end_workers(calls: SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _carry_out(piece: IOPiece) -> None:
    """Carry out a piece. Raises TransferError, and OSError if a sync fails."""
    request, file, view = piece.transfer.request, piece.transfer.file, piece.view
    if request.kind == "sync":
        file.sync()
        return
    transfer = os.preadv if request.kind == "read" else os.pwritev
    progress = Progress(request, file, piece.offset, len(view))
    while not progress.finished:
        start = progress.start
        try:
            moved = transfer(file.fd, [view[start:]], piece.offset + start)
        except OSError as error:
            progress.interrupted(error.errno or 0)
        else:
            progress.advance(moved)
        if progress.pause_s:
            time.sleep(progress.pause_s)
    file.drop_pages(piece.offset, len(view))
