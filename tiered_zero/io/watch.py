"""The in-flight table as text: for the error of a stalled request and for SIGUSR1."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import final

from tiered_zero.io.engine import IOEngine

_MAX_ROWS = 32


def dump_in_flight(engine: IOEngine) -> str:
    """A table of the engine's unfinished requests, oldest first: age, kind, size, offset, path."""
    requests = sorted(engine.in_flight(), key=lambda entry: -entry[1])
    lines = [f"I/O engine {engine.name}: {len(requests)} requests in flight"]
    for request, age_s in requests[:_MAX_ROWS]:
        lines.append(
            f"  {age_s:8.1f} s  {request.kind:<5}  {request.nbytes:>12} bytes at {request.offset:<14} {request.path}"
        )
    if len(requests) > _MAX_ROWS:
        lines.append(f"  ... and {len(requests) - _MAX_ROWS} younger ones")
    return "\n".join(lines)


@final
class SignalDump:
    """While open, SIGUSR1 prints what is in flight to stderr, then calls the handler that was there before.

    Python runs signal handlers on the main thread, and lets only that one install them: elsewhere this does nothing.
    """

    def __init__(self, engines: Sequence[IOEngine]) -> None:
        self._engines = tuple(engines)
        self.installed = threading.current_thread() is threading.main_thread()
        if self.installed:
            self._previous = signal.signal(signal.SIGUSR1, self._print)

    def _print(self, number: int, frame: FrameType | None) -> None:
        for engine in self._engines:
            os.write(2, (dump_in_flight(engine) + "\n").encode())
        if callable(self._previous):
            self._previous(number, frame)

    def close(self) -> None:
        """Restore the old handler, unless another has been put over ours since; idempotent."""
        self._engines = ()
        on_main = threading.current_thread() is threading.main_thread()
        if self.installed and on_main and signal.getsignal(signal.SIGUSR1) == self._print:
            signal.signal(signal.SIGUSR1, self._previous or signal.SIG_DFL)
            self.installed = False
