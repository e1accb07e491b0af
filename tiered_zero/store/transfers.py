"""Transfers of a store: the engine's transfers of one request joined, with checksums computed in parallel."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import final

from tiered_zero.concurrency.transfer import Transfer, wait_all
from tiered_zero.errors import StoreError, TransferError
from tiered_zero.io.engine import IOTransfer


class Once(Transfer):
    """Work that the first thread to ask for it does; the others wait for that thread. Any thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._work is None

    def run(self) -> None:
        """Do the work, unless it is done. Raises nothing."""
        with self._lock:
            if self._work is None:
                return
            try:
                self._work()
            except Exception as error:
                self._error = error
            self._work = None  # releases the request's memory

    def wait(self) -> None:
        self.run()
        if self._error is not None:
            raise self._error


@final
class StoreTransfer(Once):
    """One request of a store: the engine's transfers, and what follows them. `parts` may grow until the first wait.

    `finalize(error)` runs once, after all parts: verifies, books, and raises the error that the caller gets. The first
    of the caller and the store's finalizing thread (by `run`) runs it.
    """

    def __init__(self, name: str, parts: Sequence[IOTransfer], finalize: Callable[[Exception | None], None]) -> None:
        """`name`: for errors."""

        def work() -> None:
            error: Exception | None = None
            try:
                wait_all(parts)
            except Exception as failure:
                error = failure
            finalize(error)

        super().__init__(work)
        self._name = name
        self._parts = parts
        self._pid = os.getpid()

    def done(self) -> bool:
        """Whether it is finalized; finalizes it here where all parts are done. Never waits for a disk."""
        self._check_process()
        if not super().done() and all(part.done() for part in self._parts):
            self.run()
        return super().done()

    def wait(self) -> None:
        self._check_process()
        super().wait()

    def _check_process(self) -> None:
        """Raises TransferError in a forked child, where the lock may never be released."""
        if os.getpid() != self._pid:
            raise TransferError(
                f"{self._name}: begun by process {self._pid}; a process that was forked from it cannot wait for it. "
                "Open the store there"
            )


@final
class Joined(Transfer):
    """Several transfers as one."""

    def __init__(self, *parts: Transfer) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        wait_all(self._parts)


@final
class Worker:
    """One daemon thread that runs callables in order; they must not raise. It ends with the object."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_in_order, args=(self._queue,), name=name, daemon=True)
        weakref.finalize(self, self._queue.put, None).atexit = False  # a finalizer of its owner may need it then
        try:
            self._thread.start()
        except RuntimeError as error:  # ulimit -u or -v
            raise StoreError(
                f"The thread {name} cannot be started: {error}. Raise the limit of processes (ulimit -u) or of address "
                "space (ulimit -v)."
            ) from error

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was submitted and stop; wait for that at most `timeout_s`. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout_s)


def _run_in_order(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # keeps no request's memory alive while idle
