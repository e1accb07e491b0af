"""Defer Ctrl-C during work that cannot be undone, and call the closing functions of a run in order.

[Note: Interrupted calls] Python's own handler of SIGINT raises KeyboardInterrupt on the main thread, between any two
lines, also of this package. The interrupted call drops its step: `Entrance.abort` ends what runs, and resets what the
step has used. Some work cannot be dropped: `step()`, a backward whose updates have begun, a load that replaces values,
the write of a change under `gathered(modify=True)`, an in-place commit, `close()`. An interrupt there would make the
engine unusable, and lose the work since the last save, so KeyboardInterrupt is raised when this work has ended. A
second interrupt is raised immediately, and so is an exception of the program's own handler of SIGINT. If such an
exception ends work that cannot be undone, the engine latches (refuses later calls). A handler, such as one that sets a
time limit, may raise an error while a lane's job runs on the main thread: the error is then the job's error."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final


class _Held:
    """The handler of SIGINT during a block of `hold_interrupts`. It notes the first signal (`has_come`), and raises
    KeyboardInterrupt at the second. `is_over`: the block has ended, so every signal raises. The handler may still be
    installed then: if the block ends on another thread, that thread cannot replace it."""

    has_come = False
    is_over = False

    def __call__(self, *_: object) -> None:
        if self.has_come or self.is_over:
            raise KeyboardInterrupt
        self.has_come = True


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay a Ctrl-C inside the block: raise its KeyboardInterrupt when the block ends. A second Ctrl-C inside the
    block raises at its place. Also a decorator.

    Does nothing on a thread other than the main one, inside another such block, or if the program handles SIGINT
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
    """Calls the functions that free what a run has built, in a fixed order. One thread at a time.

    Functions that stop threads (such as the end of the lanes) come before functions that free the memory of those
    threads. If a function raises, the later ones are still called. If a second Ctrl-C interrupts a function, the next
    `close` calls it again, so all functions are idempotent."""

    def __init__(self, order: Sequence[str]) -> None:
        """`order`: the names under which functions can be added, in the order in which `close` calls them. Of one
        name's functions the one added last is called first."""
        self._acts: dict[str, list[Callable[[], Any]]] = {name: [] for name in order}

    def add(self, name: str, act: Callable[[], Any]) -> None:
        self._acts[name].append(act)

    @hold_interrupts()
    def close(self) -> None:
        """Call all functions that were not called yet, then raise the first error. Idempotent."""
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
        """If the block failed, call `close`, and again after a second Ctrl-C, because the caller gets no engine to
        close. If the block did not fail, do nothing: from now on the run owns the teardown."""
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
    """Return a function that calls `act` at its first call, and does nothing at later calls, even if the first call was
    interrupted. For closing functions that may be left incomplete: no later closing function needs their result."""
    called: list[None] = []

    def call() -> None:
        if not called:
            called.append(None)
            act()

    return call
