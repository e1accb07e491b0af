"""How a training command ends by a signal: at once, or at the next step boundary, where its state is saved first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

from tiered_zero.cli.main import INTERRUPTED

TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM."""


@final
class StopRequest:
    """What a signal asked for. `at_boundary`: finish the step, and save; else, and from the second signal on, Ctrl-C
    raises KeyboardInterrupt and SIGTERM SystemExit in the main thread. `code`: the exit code of the first signal."""

    def __init__(self) -> None:
        self.at_boundary = False
        self.code: int | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal `number`."""
        first, self.code = self.code is None, TERMINATED if number == signal.SIGTERM else INTERRUPTED
        if first and self.at_boundary:
            # not logged: the main thread may be inside of a log line
            os.write(2, b"\nFinishing this step, then saving; a second signal ends at once.\n")
        elif number == signal.SIGTERM:
            sys.exit(TERMINATED)
        else:
            raise KeyboardInterrupt


@contextmanager
def signals_stop() -> Iterator[StopRequest]:
    """Handle SIGTERM and Ctrl-C for the length of the block, so that the engine is closed and its files are removed.

    Enter it before an engine is made: a swap directory sets a handler of its own only where there is none.
    """
    request = StopRequest()
    before = {number: signal.signal(number, request.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
