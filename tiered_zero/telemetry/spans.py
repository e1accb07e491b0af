"""Spans of time by lane, named waits, and bytes by link."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WAIT_CAUSES = ("wait_param", "wait_update", "wait_grad", "wait_state", "wait_lease", "wait_ranks", "wait_activation")
LANES = (
    *("compute", "fetch", "reduce", "update", "disk read", "disk write", "all_gather", "reduce_scatter"),
    *("activations", "save"),
)


DRIVER_LANE = "compute"
"""The lane of the thread that runs the step."""

SAVE_LANE = "save"
"""The lane of that thread's calls that save or load a checkpoint, which are no compute."""


def is_wait(kind: str) -> bool:
    return kind.startswith("wait_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`start_s`, `end_s`: time.perf_counter() seconds. `lane`: compute, fetch, reduce, update, disk read, ..."""

    lane: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over an interval, usually one step. See [Note: Lanes and kinds].

    `causes`: kind -> seconds of what the driver did or waited for, on whatever lane, without those of spans inside it.
    `nbytes`: lane -> bytes that arrived (what a wait is for is not counted). `busy_s`: lane -> seconds in which it
    worked.
    """

    causes: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Sum spans, and keep them whole while `keep_spans` is set. Any thread."""

    def __init__(self, keep_spans: bool = False) -> None:
        self.keep_spans = keep_spans
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._open: list[_Frame] = []
        self._reset()

    def _reset(self) -> None:
        self._causes: defaultdict[str, float] = defaultdict(float)
        self._nbytes: defaultdict[str, int] = defaultdict(int)
        self._worked: defaultdict[str, _Union] = defaultdict(_Union)
        self._idle_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, lane: str, kind: str, name: str = "", nbytes: int = 0) -> Iterator[None]:
        """Time a block as a span of `lane`. A block that raises counts its time and no bytes.

        `kind` is what totals are kept by ("forward", "wait_param", ...). One thread at a time is inside the spans of a
        lane (autograd's while main waits in backward), so that they nest.
        """
        thread = threading.get_ident()
        with self._lock:
            outer = self._innermost(lambda frame: frame.thread == thread) or self._innermost_of(lane)
            frame = _Frame(lane=lane, start_s=time.perf_counter(), outer=outer, thread=thread)
            self._open.append(frame)
        arrived = 0
        try:
            yield
            arrived = nbytes
        finally:
            end_s = time.perf_counter()
            with self._lock:
                self._open.remove(frame)
                self._add(frame, kind, name, end_s, arrived)

    def add(self, lane: str, kind: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """Record a span that has ended, of any thread. `nbytes`: those that arrived."""
        with self._lock:
            self._add(_Frame(lane=lane, start_s=start_s, outer=self._innermost_of(lane)), kind, name, end_s, nbytes)

    def take_totals(self) -> Totals:
        """Return the sums since the last call, and reset them."""
        with self._lock:
            busy_s = {lane: max(0.0, union.seconds() - self._idle_s[lane]) for lane, union in self._worked.items()}
            totals = Totals(causes=dict(self._causes), nbytes=dict(self._nbytes), busy_s=busy_s)
            self._reset()
        return totals

    def take_spans(self) -> list[Span]:
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def _innermost(self, matches: Callable[[_Frame], bool]) -> _Frame | None:
        return next(filter(matches, reversed(self._open)), None)

    def _innermost_of(self, lane: str) -> _Frame | None:
        return self._innermost(lambda frame: frame.lane == lane)

    def _add(self, frame: _Frame, kind: str, name: str, end_s: float, nbytes: int) -> None:
        lane, outer = frame.lane, frame.outer
        if outer is not None:
            inside_s = max(0.0, end_s - max(frame.start_s, outer.start_s))
            outer.inner_s += inside_s
            if outer.lane != lane:
                self._idle_s[outer.lane] += inside_s
        own_s = max(0.0, end_s - frame.start_s - frame.inner_s)
        if frame.on_driver:
            self._causes[kind] += own_s
        self._worked[lane].add(frame.start_s, end_s)
        if is_wait(kind):
            self._idle_s[lane] += own_s
        else:
            self._nbytes[lane] += nbytes
        if self.keep_spans:
            self._spans.append(
                Span(lane=lane, name=name or kind, start_s=frame.start_s, end_s=end_s, nbytes=nbytes, kind=kind)
            )


@dataclass(eq=False, slots=True, kw_only=True)
class _Frame:
    """A span that is still open. `outer`: the one around it. `inner_s`: what the spans inside it have taken."""

    lane: str
    start_s: float
    outer: _Frame | None
    thread: int = 0
    inner_s: float = 0.0

    @property
    def on_driver(self) -> bool:
        return self.outer.on_driver if self.outer else self.lane in (DRIVER_LANE, SAVE_LANE)


class _Union:
    """Intervals, merged where they touch; kept sorted, start, end, start, end, ..., so that one that arrives late finds
    its place."""

    def __init__(self) -> None:
        self._bounds: list[float] = []

    def add(self, start_s: float, end_s: float) -> None:
        first, last = bisect_left(self._bounds, start_s), bisect_right(self._bounds, end_s)
        # a bound whose place is odd lies inside an interval, or at its end
        self._bounds[first:last] = [start_s] * (first % 2 == 0) + [end_s] * (last % 2 == 0)

    def seconds(self) -> float:
        return sum(end - start for start, end in zip(self._bounds[::2], self._bounds[1::2], strict=True))
