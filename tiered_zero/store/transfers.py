"""What a store's requests complete as, and the threads beside the caller's that complete them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import final

from tiered_zero.concurrency.transfer import Transfer, wait_all
from tiered_zero.errors import StoreError


@final
class StoreTransfer(Transfer):
    """One request of a store: `work` waits for its transfers of the engine, and verifies and books what they moved.

    The first thread that needs the outcome does the work, the store's worker if no other is before it; the others wait
    for that thread. So a wait is never behind requests that were submitted earlier.
    """

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
    """A daemon thread that runs callables in order; they must not raise. It ends with the object."""

    def __init__(self, name: str, prepare: Callable[[], object] | None = None) -> None:
        """`prepare`: is called first, on the thread. Raises StoreError if the thread cannot be started."""
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._queue.put, None).atexit = False  # a finalizer of its owner may need it then
        self.add_thread(prepare)

    def add_thread(self, prepare: Callable[[], object] | None = None) -> None:
        """Let one more thread take callables from the queue. Raises StoreError."""
        thread = threading.Thread(target=partial(_run_in_order, self._queue, prepare), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # ulimit -u or -v
            raise StoreError(
                f"The thread {self._name} cannot be started: {error}. Raise the limit of processes (ulimit -u) or of "
                "address space (ulimit -v)."
            ) from error
        self._threads.append(thread)

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was submitted and stop; wait for each thread at most `timeout_s`. Idempotent."""
        self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)


def _run_in_order(queue: SimpleQueue[Callable[[], None] | None], prepare: Callable[[], object] | None) -> None:
    if prepare is not None:
        prepare()
    while (work := queue.get()) is not None:
        work()
        del work  # keeps no request's memory alive while idle
    queue.put(None)  # the end of every thread
