"""What ends a run: closing acts in order, each carried through even where the user interrupts it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

logger = logging.getLogger("tiered_zero")


@final
class Teardown:
    """Acts that free what a run has built, entered as it is built, carried out last first. One thread at a time.

    Later acts free memory that earlier ones (ending the lanes) keep threads from using: so no act is passed over
    because it was interrupted. An act that raised is carried out once more; each must be idempotent.
    A second KeyboardInterrupt in it stops the teardown there, and `close` goes on there when it is called again.
    """

    def __init__(self) -> None:
        self._acts: list[Callable[[], Any]] = []

    def callback(self, act: Callable[[], Any]) -> None:
        self._acts.append(act)

    def try_once(self, act: Callable[[], Any]) -> None:
        """Enter an act that is passed over where it raises: nothing that comes later depends on it."""

        def once() -> None:
            acts, act_left[:] = act_left[:], []
            for left in acts:
                left()

        act_left = [act]
        self._acts.append(once)

    def close(self) -> None:
        """Carry out what is left to do; raise the first exception at the end. Does nothing once all is done."""
        first: BaseException | None = None
        is_second_try = False
        while self._acts:
            try:
                self._acts[-1]()
            except BaseException as error:
                first = first or error
                if is_second_try and not isinstance(error, Exception):
                    raise
                is_second_try = not is_second_try
                if is_second_try:
                    continue
            is_second_try = False
            self._acts.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Teardown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave everything to the run that was built; free it all where that failed."""
        if error is not None:
            try:
                self.close()
            except Exception as failure:
                logger.error("what was built of the run could not be freed: %s", failure)
