"""Measure a run: `Recorder` sums the time and bytes of spans by lane, `Ledger` counts allocated bytes by tier."""

from __future__ import annotations

import math
import operator
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiered_zero.errors import BudgetError
from tiered_zero.sizes import format_nbytes

WAIT_CAUSES = ("wait_param", "wait_update", "wait_grad", "wait_state", "wait_lease", "wait_ranks", "wait_activation")
LANES = (
    *("compute", "fetch", "reduce", "update", "disk read", "disk write", "all_gather", "reduce_scatter"),
    *("activations", "save"),
)


DRIVER_LANE = "compute"
"""The lane of the thread that runs the step."""

SAVE_LANE = "save"
"""The lane for the time that checkpoint saves take on the thread that runs the step."""

_DRIVER_LANES = (DRIVER_LANE, SAVE_LANE)


_WAIT = "wait_"
"""Prefix of every kind of wait."""


def is_wait(kind: str) -> bool:
    return kind.startswith(_WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time on a lane. See [Note: Lanes and kinds]. `start_s`, `end_s`: seconds of time.perf_counter()."""

    lane: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over an interval, usually one step. See [Note: Lanes and kinds]. `causes`: kind -> seconds of the driver's
    spans, not counting the spans inside each. `nbytes`: lane -> bytes moved. `busy_s`: lane -> seconds in which the
    lane worked."""

    causes: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Sums spans by lane and kind; while `keep_spans` is true, also keeps each span. Any thread may use it."""

    def __init__(self, keep_spans: bool = False) -> None:
        self.keep_spans = keep_spans
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._open: list[_OpenSpan] = []
        self._reset()

    def _reset(self) -> None:
        self._causes: defaultdict[str, float] = defaultdict(float)
        self._nbytes: defaultdict[str, int] = defaultdict(int)
        self._worked: defaultdict[str, list[float]] = defaultdict(list)
        """Lane -> the intervals in which it worked: [start, end, start, end, ...], sorted. Intervals that touch are
        joined."""
        self._idle_s: defaultdict[str, float] = defaultdict(float)

    def span(self, lane: str, kind: str, name: str = "", nbytes: int = 0) -> _OpenSpan:
        """Time a `with` block as a span of `lane`. If the block raises, `nbytes` is not counted. `kind`: such as
        "forward" or "wait_param". Only one thread at a time may be inside spans of one lane."""
        # autograd's thread may use the driver's lane: the main thread waits in backward
        return _OpenSpan(recorder=self, lane=lane, kind=kind, name=name, nbytes=nbytes)

    def add(self, lane: str, kind: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """Record a span that has ended already. Any thread may use it. `nbytes`: bytes that arrived in the span."""
        with self._lock:
            outer = next((span for span in reversed(self._open) if span.lane == lane), None)
            span = _OpenSpan(recorder=self, lane=lane, kind=kind, name=name, start_s=start_s, outer=outer)
            span.on_driver = outer.on_driver if outer is not None else lane in _DRIVER_LANES
            self._count(span, end_s, nbytes)

    def take_totals(self) -> Totals:
        """Return the sums of all spans since the last call, and set the sums to zero."""
        with self._lock:
            worked_s = {lane: math.fsum(map(operator.sub, at[1::2], at[::2])) for lane, at in self._worked.items()}
            busy_s = {lane: max(0.0, seconds - self._idle_s[lane]) for lane, seconds in worked_s.items()}
            totals = Totals(causes=dict(self._causes), nbytes=dict(self._nbytes), busy_s=busy_s)
            self._reset()
        return totals

    def take_spans(self) -> list[Span]:
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def _count(self, span: _OpenSpan, end_s: float, nbytes: int) -> None:
        """Add a span that has ended to the sums. Call this with the lock held."""
        lane, kind, start_s, outer = span.lane, span.kind, span.start_s, span.outer
        is_covered = False
        if outer is not None:
            is_covered = outer.lane == lane and outer.start_s <= start_s  # the outer span counts this time
            inside_s = max(0.0, end_s - max(start_s, outer.start_s))
            outer.inner_s += inside_s
            if outer.lane != lane:
                self._idle_s[outer.lane] += inside_s
        own_s = max(0.0, end_s - start_s - span.inner_s)
        if span.on_driver:
            self._causes[kind] += own_s
        if not is_covered:  # a span may be added late, anywhere in the order
            bounds = self._worked[lane]
            first, last = bisect_left(bounds, start_s), bisect_right(bounds, end_s)
            # an odd index lies inside an interval, or at its end
            bounds[first:last] = [start_s] * (first % 2 == 0) + [end_s] * (last % 2 == 0)
        if kind.startswith(_WAIT):
            self._idle_s[lane] += own_s
        else:
            self._nbytes[lane] += nbytes
        if self.keep_spans:
            name = span.name or kind
            self._spans.append(Span(lane=lane, name=name, start_s=start_s, end_s=end_s, nbytes=nbytes, kind=kind))


@dataclass(eq=False, slots=True, kw_only=True)
class _OpenSpan:
    """A span whose `with` block is running. `outer`: the span around it. `inner_s`: seconds of the spans inside it.
    `on_driver`: whether the outermost span is on a lane of the driver."""

    recorder: Recorder
    lane: str
    kind: str
    name: str
    nbytes: int = 0
    start_s: float = 0.0
    outer: _OpenSpan | None = None
    on_driver: bool = False
    thread: int = 0
    inner_s: float = 0.0

    def __enter__(self) -> None:
        recorder = self.recorder
        self.thread = thread = threading.get_ident()
        with recorder._lock:
            for span in reversed(recorder._open):
                if span.thread == thread:
                    self.outer = span
                    break
                if span.lane == self.lane and self.outer is None:
                    self.outer = span
            self.on_driver = self.outer.on_driver if self.outer is not None else self.lane in _DRIVER_LANES
            self.start_s = time.perf_counter()
            recorder._open.append(self)

    def __exit__(self, kind: object, _error: object, _traceback: object) -> None:
        end_s, recorder = time.perf_counter(), self.recorder
        with recorder._lock:
            recorder._open.remove(self)
            recorder._count(self, end_s, self.nbytes if kind is None else 0)


class Ledger:
    """Counts the bytes that a run has allocated, by tier and kind. Call `charge` before each allocation, and
    `discharge` when it is freed. Any thread may use it. `limits`: tier -> the most bytes allowed."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        self._lock = threading.Lock()
        self._now: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._peak: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._tier_now: defaultdict[str, int] = defaultdict(int)
        self._tier_peak: defaultdict[str, int] = defaultdict(int)
        self._recent_peak: defaultdict[str, int] = defaultdict(int)

    def charge(self, tier: str, kind: str, nbytes: int) -> None:
        """Add `nbytes` of `kind` on `tier`. If the tier's limit would be exceeded, raises BudgetError and adds
        nothing."""
        with self._lock:
            total = self._tier_now[tier] + nbytes
            limit = self._limits.get(tier)
            if limit is not None and total > limit:
                raise BudgetError(
                    f"{kind} needs {format_nbytes(nbytes)} more on tier {tier}: {format_nbytes(total)} in all, but "
                    f"{format_nbytes(limit)} is allowed (tiered_zero.{tier}_memory_limit). This run has left its plan."
                )
            self._now[tier, kind] += nbytes
            self._tier_now[tier] = total
            self._peak[tier, kind] = max(self._peak[tier, kind], self._now[tier, kind])
            self._tier_peak[tier] = max(self._tier_peak[tier], total)
            self._recent_peak[tier] = max(self._recent_peak[tier], total)

    def discharge(self, tier: str, kind: str, nbytes: int) -> None:
        with self._lock:
            assert self._now[tier, kind] >= nbytes, f"{tier}/{kind}: more bytes released than taken"
            self._now[tier, kind] -= nbytes
            self._tier_now[tier] -= nbytes

    def correct(self, tier: str, kind: str, nbytes: int) -> None:
        """Set the bytes of `kind` on `tier`, after a failed call has left the charges wrong."""
        with self._lock:
            self._tier_now[tier] += nbytes - self._now[tier, kind]
            self._now[tier, kind] = nbytes

    def peaks(self) -> dict[str, int]:
        """Return tier -> its peak bytes since the run began."""
        with self._lock:
            return dict(sorted(self._tier_peak.items()))

    def take_recent_peaks(self) -> dict[str, int]:
        """Return tier -> its peak bytes since the last call of this method."""
        with self._lock:
            peaks, self._recent_peak = dict(self._recent_peak), defaultdict(int, self._tier_now)
            return peaks

    def by_kind(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return tier -> kind -> (its bytes now, its peak bytes so far)."""
        with self._lock:
            table: dict[str, dict[str, tuple[int, int]]] = {}
            for (tier, kind), nbytes in sorted(self._now.items()):
                table.setdefault(tier, {})[kind] = (nbytes, self._peak[tier, kind])
            return table
