"""The save that is under way: queued behind an update, ended on a lane, and waited for by what comes after it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import final

from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.hardware.lanes import runs_on_lane
from tiered_zero.transfer import Completion, Transfer

logger = logging.getLogger("tiered_zero")


class _Phase(Enum):
    """CAPTURED: made, and perhaps queued. QUEUED: it waits for its place between two updates. ON_LANE: a lane's thread
    ends it, which no interrupt reaches. INLINE: the driver thread ends it, so that it is over when that thread does
    anything else. CANCELLED: it is discarded."""

    CAPTURED = auto()
    QUEUED = auto()
    ON_LANE = auto()
    INLINE = auto()
    CANCELLED = auto()


@final
class QueuedSave:
    """One save of one tag, or of this rank's part of it. The driver thread makes it and waits for it; that thread or a
    lane's writes it.

    It is known as `LastSave` before it is queued, so that an interrupt at any line hides no write from `wait`. Where
    the driver was interrupted before the save was queued, nothing ever writes it: it is cancelled.
    """

    def __init__(self, tag: TagWriter) -> None:
        self.tag = tag
        self.cut = Completion()
        """Its place between two updates is over; the error of an update that failed before."""
        self.end = Completion()
        """The tag is ended, or this rank's part of it written; the error of the write."""
        self._phase = _Phase.CAPTURED
        self._lock = threading.Lock()

    def set_queued(self) -> None:
        """Say that `write` will be called, unless an update fails before."""
        with self._lock:
            if self._phase is _Phase.CAPTURED:
                self._phase = _Phase.QUEUED

    def cancel(self) -> bool:
        """Discard the tag, unless its write has begun. Returns whether it is discarded. Idempotent."""
        with self._lock:
            if self._phase in (_Phase.CAPTURED, _Phase.QUEUED):
                self._phase = _Phase.CANCELLED
        if self._phase is not _Phase.CANCELLED:
            return False
        self.tag.discard()
        return True

    def discard(self) -> None:
        """Discard the tag, unless it was published, once no lane writes it."""
        if self.cancel():
            return
        if self._phase is _Phase.ON_LANE:
            with suppress(Exception):
                self.end.wait()
        self.tag.discard()

    def write(self, act: Callable[[], None]) -> None:
        """End the tag by `act`, on the calling thread; do nothing where it was cancelled. Log a failure on a lane,
        which the driver raises later, and an interrupt, after which no call raises one. Raises what `act` raises."""
        on_lane = runs_on_lane()
        with self._lock:
            if self._phase is _Phase.CANCELLED:
                return
            self._phase = _Phase.ON_LANE if on_lane else _Phase.INLINE
        try:
            with self.tag.writing():
                act()
        except Exception as error:
            if on_lane:
                logger.error("the save of checkpoint %s failed, and training goes on: %s", self.tag.tag, error)
            self.end.fail(error)
            raise
        except BaseException as error:
            if not self.tag.is_published:
                logger.warning(
                    "checkpoint %s was not written: %s came in its middle. A load finds the last complete one, or a "
                    "commit in place that was decided before that.",
                    self.tag.tag,
                    type(error).__name__,
                )
            raise
        self.end.complete()

    def hurry(self) -> None:
        """Say that something waits for it, so that it yields to nothing any more. Any thread; idempotent."""
        self.tag.writer.hurry()

    def wait(self) -> None:
        """Return when it is ended. Raises the error of its write; that of an update before it is logged, for the engine
        raises it."""
        self.hurry()
        if self._phase is _Phase.QUEUED:
            try:
                self.cut.wait()
            except Exception as error:
                if self.cancel() and not self.end.done():
                    logger.error("checkpoint %s was not written: %s", self.tag.tag, error)
                    return
        if self._phase is _Phase.CAPTURED:  # an interrupt came as it was queued
            self.cancel()
        if self._phase is _Phase.CANCELLED or (self._phase is _Phase.INLINE and not self.end.done()):
            self.tag.discard()  # which may have been interrupted
        if self._phase in (_Phase.QUEUED, _Phase.ON_LANE) or self.end.done():
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
