"""Stop training on a signal: at the end of the current step, where the state can be saved, or at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM."""


@final
class StopRequest:
    """Remembers that a signal has asked the program to stop. `at_boundary`: whether the first signal is only
    remembered; if not, it raises. Later signals always raise: KeyboardInterrupt (Ctrl-C) or SystemExit (SIGTERM), in
    the main thread. `code`: the exit code for the first signal; None before it."""

    def __init__(self, at_boundary: bool) -> None:
        self.at_boundary = at_boundary
        self.code: int | None = None
        self.answer = b"\nFinishing this step, then saving; a second signal ends at once.\n"
        """The text to write to stderr at the first signal, if `at_boundary` is true."""
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        """Whether a signal has come."""
        return self.code is not None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal `number`: Python calls this in the main thread, with the interrupted stack frame."""
        if os.getpid() != self._pid:  # a forked worker: its parent decides when it ends
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        first, code = self.code is None, TERMINATED if number == signal.SIGTERM else INTERRUPTED
        self.code = code if first else self.code
        if first and self.at_boundary:
            # not logged: the main thread may be inside of a log line
            os.write(2, self.answer)
        else:
            raise SystemExit(TERMINATED) if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def stop_on_signals(*, at_boundary: bool = True) -> Iterator[StopRequest]:
    """Let SIGTERM and Ctrl-C inside the block ask training to end, instead of ending it immediately.

    Yields a StopRequest to check after each `engine.step()`: it is true once a signal has come. A second signal raises
    SystemExit or KeyboardInterrupt immediately; if it comes in the middle of an update, the engine can then only be
    closed. Enter the block in the main thread. `at_boundary`: whether the first signal waits for this check; if not, it
    raises like a second one.
    """
    request = StopRequest(at_boundary)
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell script's background jobs ignore it
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, request.take) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
