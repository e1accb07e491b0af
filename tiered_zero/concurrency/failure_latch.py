"""The memory of a failure: what surfaces the first time, and what every later use is refused with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, final

from tiered_zero.errors import EngineFailedError, TieredZeroError


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
