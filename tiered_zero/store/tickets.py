"""Requests of the store: the engine's tickets joined, with checksums computed beside them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import final

import xxhash

from tiered_zero.errors import StoreError, TransferError
from tiered_zero.io.engine import Request, Ticket

digest: Callable[[bytes | bytearray | memoryview], int] = xxhash.xxh3_64_intdigest
"""xxh3-64 of one range; releases the GIL."""


@final
class Once:
    """A piece of work that whoever comes first does, and everybody else waits for. Any thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._work is None

    def run(self) -> None:
        """Never raises but for KeyboardInterrupt and its like, which leave the work undone for the next caller."""
        with self._lock:
            if self._work is None:
                return
            try:
                self._work()
            except Exception as error:
                self._error = error
            self._work = None  # lets go of the request's memory

    def wait(self) -> None:
        """Run or wait; raise what the work raised, each time."""
        self.run()
        if self._error is not None:
            raise self._error


@final
class StoreTicket(Ticket):
    """Several tickets of the engine and what must follow them, as one. `parts` may grow until it is first asked.

    `settle(error)` runs once, after all parts have finished: verifies, books, and raises what the caller must see.
    """

    def __init__(self, request: Request, parts: Sequence[Ticket], settle: Callable[[Exception | None], None]) -> None:
        self.request = request
        self._parts = parts
        self._pid = os.getpid()
        self._once = Once(lambda: settle(self._join()))

    def done(self) -> bool:
        """What has arrived is settled here rather than when the settling thread gets to it; never waits for a disk."""
        self._check_process()
        if not self._once.done() and all(part.done() for part in self._parts):
            self._once.run()
        return self._once.done()

    def wait(self) -> None:
        self._check_process()
        self._once.wait()

    def _check_process(self) -> None:
        """Raises TransferError in a forked child, where the lock may have been left taken for good."""
        if os.getpid() != self._pid:
            raise TransferError(
                f"{self.request.kind} of {self.request.path}: begun by process {self._pid}; a process that was forked "
                "from it cannot wait for it. Open the store there"
            )

    def settle(self) -> None:
        """What the store's settling thread does if the caller did not come first."""
        self._once.run()

    @property
    def seconds(self) -> float:
        return max((part.seconds for part in self._parts), default=0.0) if self.done() else 0.0

    def _join(self) -> Exception | None:
        first: Exception | None = None
        for part in self._parts:
            try:
                part.wait()
            except Exception as error:
                first = first or error
        return first


@final
class Worker:
    """One daemon thread that runs callables in order; they must not raise."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
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
        """Finish what was submitted and stop; give up waiting after `timeout_s`. Idempotent."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # keeps no request's memory alive while idle
