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


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Raise the first KeyboardInterrupt of the block as it ends. Also a decorator.

    Does nothing off the main thread, inside of another such block, and where the program handles SIGINT by itself.
    """
    is_main = threading.get_ident() == threading.main_thread().ident
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    has_come, is_over = False, False

    def note(*_: object) -> None:
        nonlocal has_come
        if has_come or is_over:
            raise KeyboardInterrupt
        has_come = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        is_over = True
        here = threading.get_ident() == threading.main_thread().ident  # else a thread collects an abandoned block
        if here and signal.getsignal(signal.SIGINT) is note:  # notebooks set Python's own anew for each cell
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if has_come and here:
            raise KeyboardInterrupt
