"""Define the package's one future type, a worker thread that runs callables in order, and the latch that keeps
the first failure."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Final, NoReturn, final

from tiered_zero.errors import EngineFailedError, StoreError, TieredZeroError


class Transfer(ABC):
    """One asynchronous operation, such as a job of a lane, a disk request or a stage of an update. Any thread may use
    it.

    A transfer completes once, with or without an error. Until then the caller must keep the operation's memory alive,
    and must not use it."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the transfer is complete, with or without an error. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the transfer is complete. If it failed, every call raises its error."""


class Completion(Transfer):
    """A transfer that its owner completes by calling `complete` or `fail`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._event = threading.Event()

    def complete(self) -> None:
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Complete with `error`. Every `wait` raises it."""
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
"""A transfer that is complete from the start."""

COMPLETED.complete()


def wait_quietly(transfer: Transfer) -> None:
    """Wait until a transfer is complete, and ignore its error. Raises MemoryError if the wait itself runs out of
    memory; the transfer may then still use its buffers."""
    try:
        transfer.wait()
    except Exception as error:
        if isinstance(error, MemoryError) and not transfer.done():
            raise
        error.__traceback__ = None  # its frames hold the memory


def wait_all(transfers: Iterable[Transfer | None]) -> None:
    """Wait for all transfers, even if some fail, then raise the first error. Skip each None in `transfers`."""
    first: Exception | None = None
    for transfer in transfers:
        try:
            if transfer is not None:
                transfer.wait()
        except Exception as error:  # the others may still use their memory
            first = first or error
            if isinstance(error, MemoryError) and transfer is not None and not transfer.done():
                wait_quietly(transfer)  # the wait itself had no memory
    if first is not None:
        raise first


@final
class Joined(Transfer):
    """One transfer for several others. It is complete when all of them are."""

    def __init__(self, *parts: Transfer) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        wait_all(self._parts)


@final
class SharedWork(Transfer):
    """A transfer with work to do, such as verifying the bytes of a disk request. The first thread that waits does the
    work; other threads wait for that thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._work is None

    def run(self) -> None:
        """Do the work if no thread has done it yet. An error of the work is raised by `wait`, not here."""
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
    """A daemon thread that runs callables in order; they must not raise. The thread ends when this object is
    collected."""

    def __init__(self, name: str) -> None:
        """Start the thread. Raises StoreError if it cannot be started."""
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._queue.put, None).atexit = False  # a finalizer of its owner may need it then
        self._thread = threading.Thread(target=_run_in_order, args=(self._queue,), name=name, daemon=True)
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
        """Let the thread end after all submitted callables, and wait for this at most `timeout_s` seconds. None: no
        limit."""
        self._queue.put(None)
        self._thread.join(timeout_s)


def _run_in_order(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # keeps no request's memory alive while idle


@final
class FailureLatch:
    """Remembers the first failure of a component. Any thread may use it.

    The component calls `set` when it fails, and `check` before each use. Each function that the user calls runs inside
    `surfacing`. So the first error that the user gets is the original failure, not an EngineFailedError that the
    failure has caused. Later errors are raised unchanged."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The first failure."""
        self._lock = threading.Lock()
        self.has_surfaced = False
        """Whether the user has seen the original error. The engine resets this when a step succeeds again."""

    def set(self, error: BaseException) -> None:
        """Remember `error` if it is the first."""
        with self._lock:
            if self.error is None:
                self.error = error

    def check(self, refusal: Callable[[BaseException], str] | None = None) -> None:
        """Raise the remembered failure, if there is one. With `refusal`, raise an EngineFailedError instead. Its text
        is `refusal(error)`, and its cause is the remembered failure."""
        if self.error is None:
            return
        if refusal is None:
            raise self.error
        raise EngineFailedError(refusal(self.error)) from self.error

    @contextmanager
    def surfacing(self) -> Iterator[None]:
        """Return a context manager for a function that the user calls. For the first error inside, it raises the
        error's `root_cause`. It raises later errors unchanged, until `has_surfaced` is reset."""
        try:
            yield
        except Exception as error:
            self.surface(error)

    def surface(self, error: Exception) -> NoReturn:
        """Raise the `root_cause` of `error` at the first call, and `error` itself at later calls. Call this in the
        `except` block that has caught `error`."""
        has_surfaced, self.has_surfaced = self.has_surfaced, True
        if has_surfaced or (cause := root_cause(error)) is error:
            raise  # the error that is being handled
        raise cause from cause.__cause__


def root_cause(error: BaseException) -> BaseException:
    """Return the original failure that caused an EngineFailedError. Return any other error unchanged."""
    while isinstance(error, EngineFailedError) and isinstance(error.__cause__, TieredZeroError):
        if isinstance(error.__cause__, EngineFailedError) and error.__cause__.__cause__ is None:
            break  # of a component that was latched without a failure: the refusal says what to do
        error = error.__cause__
    return error
