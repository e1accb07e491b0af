"""Who did what when: spans by lane, named waits, bytes by link."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WAIT_CAUSES = ("wait_param", "wait_update", "wait_grad", "wait_state", "wait_activation", "wait_lease")
LANES = ("compute", "gather", "reduce", "update", "disk read", "disk write")


def is_wait(kind: str) -> bool:
    return kind.startswith("wait_")


@dataclass(frozen=True, slots=True)
class Span:
    """`start_s`, `end_s`: time.perf_counter() seconds. `lane`: compute, gather, reduce, update, disk read, ..."""

    lane: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0
    kind: str = ""


@dataclass(frozen=True)
class Totals:
    """Sums over a stretch of time, usually one step.

    `seconds`: (lane, kind) -> the spans' own seconds, without those of spans inside them. `nbytes`: lane -> bytes that
    arrived (what a wait is for is not counted). `busy_s`: lane -> seconds in which it worked. [Note: Lanes and kinds].
    """

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Collects totals always, and whole spans only while `keep_spans` is set. Any thread."""

    def __init__(self, keep_spans: bool = False) -> None:
        self.keep_spans = keep_spans
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._open: defaultdict[str, list[_Frame]] = defaultdict(list)
        self._start_anew()

    def _start_anew(self) -> None:
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._nbytes: defaultdict[str, int] = defaultdict(int)
        self._busy: defaultdict[str, _Union] = defaultdict(_Union)

    @contextmanager
    def span(self, lane: str, kind: str, name: str = "", nbytes: int = 0) -> Iterator[None]:
        """Time a block; it ends even on error, and then counts no bytes.

        `kind` is what totals are kept by ("forward", "wait_param", ...). One thread at a time is inside a lane's spans
        (autograd's while main waits in backward), so that they nest.
        """
        frame = _Frame(time.perf_counter())
        with self._lock:
            self._open[lane].append(frame)
        arrived = 0
        try:
            yield
            arrived = nbytes
        finally:
            end_s = time.perf_counter()
            with self._lock:
                self._open[lane].remove(frame)
                self._add(lane, kind, name, frame, end_s, arrived)

    def add(self, lane: str, kind: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """Record what is over. `nbytes`: those that arrived."""
        with self._lock:
            self._add(lane, kind, name, _Frame(start_s), end_s, nbytes)

    def _add(self, lane: str, kind: str, name: str, frame: _Frame, end_s: float, nbytes: int) -> None:
        seconds = end_s - frame.start_s
        if outer := self._open[lane]:
            outer[-1].inner_s += min(seconds, end_s - outer[-1].start_s)
        self._seconds[lane, kind] += max(0.0, seconds - frame.inner_s)
        if not is_wait(kind):
            self._nbytes[lane] += nbytes
        self._busy[lane].add(frame.start_s, end_s)
        if self.keep_spans:
            self._spans.append(Span(lane, name or kind, frame.start_s, end_s, nbytes, kind))

    def take_totals(self) -> Totals:
        """Sums since the last call; starts anew."""
        with self._lock:
            seconds, nbytes, unions = dict(self._seconds), dict(self._nbytes), self._busy
            self._start_anew()
        waits: defaultdict[str, float] = defaultdict(float)
        for (lane, kind), waited_s in seconds.items():
            waits[lane] += waited_s if is_wait(kind) else 0.0
        busy_s = {lane: max(0.0, union.seconds() - waits[lane]) for lane, union in unions.items()}
        return Totals(seconds, nbytes, busy_s)

    def take_spans(self) -> list[Span]:
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


@dataclass(eq=False)
class _Frame:
    """A span that is still open: what the spans inside it have taken."""

    start_s: float
    inner_s: float = 0.0


class _Union:
    """Intervals, merged where they touch; kept sorted, so that one that arrives late finds its place."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def add(self, start_s: float, end_s: float) -> None:
        first, last = bisect_left(self._ends, start_s), bisect_right(self._starts, end_s)
        if first < last:
            start_s, end_s = min(start_s, self._starts[first]), max(end_s, self._ends[last - 1])
        self._starts[first:last] = [start_s]
        self._ends[first:last] = [end_s]

    def seconds(self) -> float:
        return sum(end - start for start, end in zip(self._starts, self._ends, strict=True))
