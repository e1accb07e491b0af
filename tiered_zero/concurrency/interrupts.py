"""Defer Ctrl-C during work that cannot be undone.

[Note: Interrupted calls]
Python's own handler of SIGINT raises KeyboardInterrupt on the main thread, between any two lines, also of this package.
The interrupted call drops its step: `Entrance.abort` ends what runs, and resets what the step has used. Some steps
cannot be dropped: inside of `step()`, in a backward whose updates have begun, while a load replaces values, while a
change of `gathered(modify=True)` is written, in an in-place commit, in `close()`. An interrupt there would make the
engine unusable, and lose the work since the last save. So the interrupt is raised after those. A second interrupt is
raised at once, and so is an exception of the program's own handler of SIGINT: if it ends work that cannot be undone,
the engine latches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
