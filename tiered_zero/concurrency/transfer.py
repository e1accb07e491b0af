"""The one future of the package."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final, final

from tiered_zero.concurrency.interrupts import wait_for_event


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
            wait_for_event(self._event)
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
