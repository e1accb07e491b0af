"""The in-flight table as text: for the error of a stalled request and on a signal that the program chose."""

from __future__ import annotations

import os
import signal
import weakref
from types import FrameType

from tiered_zero.io.engine import IOEngine

_MAX_ROWS = 32

_watched: weakref.WeakSet[IOEngine] = weakref.WeakSet()


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


def watch(engine: IOEngine) -> None:
    """Show `engine` in the tables of `dump_on` for as long as it exists."""
    _watched.add(engine)


def dump_on(number: int) -> None:
    """Print every run's disk requests in flight to stderr each time the process gets the signal `number`, such as
    `signal.SIGUSR1`; then call the handler of before.

    Call it in the main thread. No other call of the package handles this signal, so without it SIGUSR1 ends a process.
    """

    def dump(number: int, frame: FrameType | None) -> None:
        for engine in list(_watched):
            os.write(2, (dump_in_flight(engine) + "\n").encode())
        if callable(previous):
            previous(number, frame)

    previous = signal.signal(number, dump)
