"""The one future of the package, the thread that ends what nobody waits for, and the memory of a failure."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Final, NoReturn, final

from tiered_zero.errors import EngineFailedError, StoreError, TieredZeroError

STOPPED_S = 5.0
"""A blocked wait that looks at the clock so late was stopped with its process (Ctrl-Z, a machine that slept): no limit
counts it."""


class Transfer(ABC):
    """One asynchronous operation: a job of a lane, a disk request, a milestone of an update.

    It completes once, well or badly, and carries its own error. The memory that it reads or writes is its own until it
    is done; the caller keeps that memory alive. Any thread.
    """

    @abstractmethod
    def done(self) -> bool:
        """Whether it is complete, well or badly. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is complete; raise its error, each time, if it failed."""


@final
class Completion(Transfer):
    """A transfer that its owner completes by hand."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._event = threading.Event()

    def complete(self) -> None:
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Complete with an error, which every wait from now on raises."""
        self.error = error
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        if not self._event.is_set():
            self._event.wait()
        if self.error is not None:
            raise self.error


COMPLETED: Final = Completion()
"""An operation that was complete when it was asked for."""

COMPLETED.complete()


def wait_quietly(transfer: Transfer) -> None:
    """Wait until a transfer is over, and drop its error. A MemoryError of the wait itself is raised: the transfer may
    still use its memory."""
    try:
        transfer.wait()
    except Exception as error:
        if isinstance(error, MemoryError) and not transfer.done():
            raise
        error.__traceback__ = None  # its frames hold the memory


def wait_all(transfers: Iterable[Transfer | None]) -> None:
    """Wait for all of them, then raise the first error: none of them uses its memory any more."""
    first: Exception | None = None
    for transfer in transfers:
        try:
            if transfer is not None:
                transfer.wait()
        except Exception as error:
            first = first or error
            if isinstance(error, MemoryError) and transfer is not None and not transfer.done():
                wait_quietly(transfer)  # the error is of the wait
    if first is not None:
        raise first


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
class SharedWork(Transfer):
    """Work that the first thread which needs its outcome does; the others wait for that thread.

    As the end of a disk request, which waits for the engine's transfers and verifies what they moved: a `Worker` does
    it if no other thread is before it, so that a wait is never behind requests that were submitted earlier.
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


@final
class FailureLatch:
    """Remember the first failure of a component, and refuse every later use of it. Any thread.

    The component calls `set` when it fails and `check` before each use. The object that the user calls wraps its entry
    points in `surfacing`: the user then sees the original error once, and the refusals of `check` after that.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The first failure."""
        self._lock = threading.Lock()
        self.has_surfaced = False
        """Whether `surfacing` has raised. The user's object clears it where work succeeds again."""

    def set(self, error: BaseException) -> None:
        """Remember `error`, unless an earlier one is remembered."""
        with self._lock:
            if self.error is None:
                self.error = error

    def check(self, refusal: Callable[[BaseException], str] | None = None) -> None:
        """Raise once a failure is remembered.

        `refusal(error)`: the text of an EngineFailedError, raised from the original error: what cannot be used any
        more, and from where to resume. None: the original error itself is raised, each time.
        """
        if self.error is None:
            return
        if refusal is None:
            raise self.error
        raise EngineFailedError(refusal(self.error)) from self.error

    @contextmanager
    def surfacing(self) -> Iterator[None]:
        """Raise the original error the first time that the block raises; what the block raises after that."""
        try:
            yield
        except Exception as error:
            self.surface(error)

    def surface(self, error: Exception) -> NoReturn:
        """Raise the original error of `error`, which is handled now, the first time; `error` itself after that."""
        has_surfaced, self.has_surfaced = self.has_surfaced, True
        if has_surfaced or (cause := root_cause(error)) is error:
            raise  # what is handled now
        raise cause from cause.__cause__


def root_cause(error: BaseException) -> BaseException:
    """The failure that a refusal was raised from, through every latch; `error` itself if it is no refusal."""
    while isinstance(error, EngineFailedError) and isinstance(error.__cause__, TieredZeroError):
        if isinstance(error.__cause__, EngineFailedError) and error.__cause__.__cause__ is None:
            break  # of a component that was latched without a failure: the refusal says what to do
        error = error.__cause__
    return error
