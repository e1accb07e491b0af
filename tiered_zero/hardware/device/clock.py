"""Times what lanes launch by the device's own events: on the host a span of a transfer would be that of its launch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.telemetry.spans import Recorder

MAX_PENDING = 1 << 14
"""Spans that wait for a step; of an evaluation without one the oldest are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A span whose events are recorded and may not have come."""

    recorder: Recorder
    lane: str
    kind: str
    name: str
    nbytes: int
    start: torch.Event
    end: torch.Event


@final
class DeviceClock:
    """Pairs of events on a device, and the host's time of one of them, from which the others' are counted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)
        self._first: _Pending | None = None
        """Before those; taken out of them first, for a lane's append to a full deque drops the first there."""
        self._zero: torch.Event | None = None
        """An event that has come, at `_zero_s` of time.perf_counter()."""
        self._zero_s = 0.0

    @contextmanager
    def span(self, recorder: Recorder, lane: str, kind: str, name: str = "", nbytes: int = 0) -> Iterator[None]:
        """Time what the block launches on the current stream. Nothing is recorded of a block that raises. On a lane."""
        start = self._record()
        yield
        end = self._record()
        self._pending.append(
            _Pending(recorder=recorder, lane=lane, kind=kind, name=name, nbytes=nbytes, start=start, end=end)
        )

    def add_spans(self) -> None:
        """Add the spans whose ends have come, in the order of their launch; the others come with the next call.

        The zero follows them: torch gives milliseconds in fp32, which has no microseconds left after some minutes.
        """
        if self._first is None and not self._pending:
            return
        if self._zero is None:
            self._zero = self._record()
            self._zero.synchronize()
            self._zero_s = time.perf_counter()
        while self._first is not None or self._pending:
            span = self._first = self._first or self._pending.popleft()
            if not span.end.query():
                return
            self._first = None
            end_s = self._zero_s + self._zero.elapsed_time(span.end) / 1e3
            start_s = end_s - span.start.elapsed_time(span.end) / 1e3
            span.recorder.add(span.lane, span.kind, span.name, start_s, end_s, span.nbytes)
            self._zero, self._zero_s = span.end, end_s

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
