"""End a run: call every closing act, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, final

from tiered_zero.concurrency.interrupts import hold_interrupts

logger = logging.getLogger("tiered_zero")


@final
class Teardown:
    """Calls the acts that free what a run has built, in the order of their names. One thread at a time.

    Earlier acts (such as ending the lanes) stop threads from using memory that later acts free. If an act raises, the
    later acts are still called. If a second Ctrl-C interrupts an act, the next `close` calls that act again: acts are
    idempotent."""

    def __init__(self, order: Sequence[str] = ("",)) -> None:
        """`order`: the names under which closing functions may be added, in the order in which they are called. Of one
        name's functions the one added last is called first."""
        self._acts: dict[str, list[Callable[[], Any]]] = {name: [] for name in order}

    def add(self, name: str, act: Callable[[], Any]) -> None:
        self._acts[name].append(act)

    def callback(self, act: Callable[[], Any]) -> None:
        """Add an act to a teardown without names."""
        self.add("", act)

    @hold_interrupts()
    def close(self) -> None:
        """Call all acts that are left, then raise the first error. Does nothing if none is left."""
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
        """If the block failed, free everything, also after a second Ctrl-C: the caller gets no engine to close. If the
        block did not fail, the run owns the teardown."""
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
    """Return a function that calls `act` the first time only, even if that call was interrupted. For acts on whose end
    no later act depends."""
    called: list[None] = []

    def call() -> None:
        if not called:
            called.append(None)
            act()

    return call
