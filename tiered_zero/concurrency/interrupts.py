"""Hold Ctrl-C back while what runs cannot be undone.

[Note: Interrupted calls]
Python's own handler of SIGINT raises KeyboardInterrupt on the main thread, between any two lines, of ours too. The call
that it ends drops its step: `Entrance.abort` ends what runs, and resets what the step has used. Where the step
cannot be dropped any more (inside of `step()`, in a backward whose updates have begun, where a load replaces values, in
an in-place commit, in `close()`) it would end the engine's use, and with it the work since the last save. So it is
raised behind those. A second one is raised at once, and so is what a handler of the program raises: where it ends what
cannot be undone the engine latches.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Held:
    """The handler of SIGINT within a block. `is_over`: the block has ended, on a thread that could not take it off."""

    has_come = False
    is_over = False

    def __call__(self, *_: object) -> None:
        if self.has_come or self.is_over:
            raise KeyboardInterrupt
        self.has_come = True


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Raise the first KeyboardInterrupt of the block as it ends. Also a decorator.

    Does nothing off the main thread, inside of another such block, and where the program handles SIGINT by itself.
    """
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
