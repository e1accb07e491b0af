"""Defer Ctrl-C during work that cannot be undone, such as the end of a run, which calls every closing act in order.

[Note: Interrupted calls]
Python's own handler of SIGINT raises KeyboardInterrupt on the main thread, between any two lines, also of this package.
The interrupted call drops its step: `Entrance.abort` ends what runs, and resets what the step has used. Some steps
cannot be dropped: inside of `step()`, in a backward whose updates have begun, while a load replaces values, while a
change of `gathered(modify=True)` is written, in an in-place commit, in `close()`. An interrupt there would make the
engine unusable, and lose the work since the last save. So the interrupt is raised after those. A second interrupt is
raised at once, and so is an exception of the program's own handler of SIGINT: if it ends work that cannot be undone,
the engine latches. An error that a handler raises in a lane's job on the main thread, such as a time limit's, is the
job's error.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final


class _Held:
    """The handler of SIGINT during a block. `has_come`: the signal has come once. `is_over`: the block has ended, on a
    thread that cannot reset handlers."""

    has_come = False
    is_over = False

    def __call__(self, *_: object) -> None:
        if self.has_come or self.is_over:
            raise KeyboardInterrupt
        self.has_come = True


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold back the first KeyboardInterrupt inside the block, and raise it as the block ends. Also a decorator.

    Does nothing on threads other than the main one, inside of another such block, and if the program handles SIGINT
    itself."""
    main, before = threading.main_thread().ident, signal.getsignal(signal.SIGINT)
    is_free = before is signal.default_int_handler or (isinstance(before, _Held) and before.is_over)
    if threading.get_ident() != main or not is_free:
        yield
        return
    held = _Held()
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        held.is_over = True
        if threading.get_ident() == main:  # else another thread collects an abandoned block
            if signal.getsignal(signal.SIGINT) is held:  # notebooks set Python's own anew for each cell
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if held.has_come:
                raise KeyboardInterrupt


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
