"""The save that is under way: queued behind an update, ended on a lane, and waited for by what comes after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import final

from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.concurrency.transfer import Completion, Transfer

logger = logging.getLogger("tiered_zero")


@final
class QueuedSave:
    """One save of one tag, or of this rank's part of it. The driver thread makes it and waits for it; a lane may write
    it."""

    def __init__(self, tag: TagWriter) -> None:
        self.tag = tag
        self.cut = Completion()
        """Its place between two updates is over; the error of an update that failed before, or of the write there."""
        self.end = Completion()
        """The tag is ended, or this rank's part of it written; the error of the write."""
        self.is_queued = False
        """Whether `write` was called, or will be, unless an update fails before."""

    def write(self, act: Callable[[], None]) -> None:
        """End the tag by `act`, on the calling thread. Log an interrupt, after which no call raises an error. Raises
        what `act` raises."""
        try:
            with self.tag.writing():
                act()
        except BaseException as error:
            if not isinstance(error, Exception) and not self.tag.is_published:
                logger.warning(
                    "checkpoint %s was not written: %s came in its middle. A load finds the last complete one, or a "
                    "commit in place that was decided before that.",
                    self.tag.tag,
                    type(error).__name__,
                )
            self.end.fail(error)
            raise
        self.end.complete()

    def discard(self) -> None:
        """Discard the tag, unless it was published, once nothing writes it."""
        if self.is_queued:
            with suppress(Exception):
                self._wait()
        self.tag.discard()

    def hurry(self) -> None:
        """Say that something waits for it, so that it yields to nothing any more. Any thread; idempotent."""
        self.tag.writer.hurry()

    def wait(self) -> None:
        """Return when it is ended. Raises the error of its write; that of an update, which the engine raises, is
        logged."""
        self.hurry()
        try:
            self._wait()
        except Exception as error:
            if self.end.done():
                raise
            self.tag.discard()
            logger.error("checkpoint %s was not written: %s", self.tag.tag, error)

    def _wait(self) -> None:
        try:
            self.cut.wait()
        except Exception:
            if not self.end.done():
                raise
        self.end.wait()


@final
class SaveRead(Transfer):
    """The end of what a save reads, all of it or a sub-group's bytes: who waits for it hurries the save."""

    def __init__(self, save: QueuedSave) -> None:
        self._save: QueuedSave | None = save
        self._read = Completion()

    def complete(self) -> None:
        self._read.complete()
        self._save = None  # this may be kept until the next save

    def done(self) -> bool:
        return self._read.done()

    def wait(self) -> None:
        if (save := self._save) is not None:
            save.hurry()
        self._read.wait()


@final
class LastSave:
    """The save that is under way, if there is one. Refers to nothing that refers to the engine. Driver thread."""

    def __init__(self) -> None:
        self._save: QueuedSave | None = None

    def set(self, save: QueuedSave) -> None:
        self._save = save

    def wait(self) -> None:
        """Return when it is durable. Raises its error, once."""
        if self._save is None:
            return
        try:
            self._save.wait()
        except Exception:
            self._save = None
            raise
        self._save = None
