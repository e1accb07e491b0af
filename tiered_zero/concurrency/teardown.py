"""End a run: closing acts in order, none of them passed over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, final

from tiered_zero.concurrency.interrupts import hold_interrupts

logger = logging.getLogger("tiered_zero")


@final
class Teardown:
    """Acts that free what a run has built, carried out in the order of their names. One thread at a time.

    Later acts free memory that earlier ones (ending the lanes) keep threads from using: so an act that raises passes no
    later one over, and one that a second Ctrl-C has broken off is carried out again by the next `close`: acts are
    idempotent.
    """

    def __init__(self, order: Sequence[str] = ("",)) -> None:
        """`order`: every name; acts of one name are carried out last first."""
        self._acts: dict[str, list[Callable[[], Any]]] = {name: [] for name in order}

    def add(self, name: str, act: Callable[[], Any]) -> None:
        self._acts[name].append(act)

    def callback(self, act: Callable[[], Any]) -> None:
        """Add an act where acts have no names."""
        self.add("", act)

    @hold_interrupts()
    def close(self) -> None:
        """Carry out what is left to do; raise the first error at the end. Does nothing once all is done."""
        first: Exception | None = None
        for acts in self._acts.values():
            while acts:
                try:
                    acts[-1]()
                except Exception as error:
                    first = first or error
                acts.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Teardown:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        """Leave everything to the run that was built; free it all if that failed.

        After a second Ctrl-C, too: the caller gets no engine to close later.
        """
        if error is None:
            return
        try:
            self.close()
        except Exception as failure:
            logger.error("what was built of the run could not be freed: %s", failure)
        except BaseException:
            self.close()
            raise


def once(act: Callable[[], Any]) -> Callable[[], None]:
    """An act that is not carried out again if it was broken off: nothing that comes later depends on it."""

    def carry_out() -> None:
        acts, left[:] = left[:], []
        for one in acts:
            one()

    left = [act]
    return carry_out
