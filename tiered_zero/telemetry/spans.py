"""Who did what when: spans by lane, named waits, bytes by link."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WAIT_CAUSES = ("wait_param", "wait_update", "wait_grad", "wait_state", "wait_activation", "wait_lease")


@dataclass(frozen=True, slots=True)
class Span:
    """`start_s`, `end_s`: time.perf_counter() seconds. `lane`: compute, gather, reduce, update, disk read, ..."""

    lane: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0


class Recorder:
    """Collects totals always, and whole spans only while `keep_spans` is set. Any thread."""

    def __init__(self, keep_spans: bool = False) -> None:
        self.keep_spans = keep_spans
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._nbytes: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def span(self, lane: str, kind: str, name: str = "", nbytes: int = 0) -> Iterator[None]:
        """Time a block; it ends even on error. `kind` is what totals are kept by ("forward", "wait_param", ...)."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, kind, name, start_s, time.perf_counter(), nbytes)

    def add(self, lane: str, kind: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        with self._lock:
            self._seconds[(lane, kind)] += end_s - start_s
            self._nbytes[kind] += nbytes
            if self.keep_spans:
                self._spans.append(Span(lane, name or kind, start_s, end_s, nbytes))

    def take_totals(self) -> tuple[dict[tuple[str, str], float], dict[str, int]]:
        """Seconds by (lane, kind) and bytes by kind since the last call; starts anew."""
        with self._lock:
            seconds, nbytes = dict(self._seconds), dict(self._nbytes)
            self._seconds.clear()
            self._nbytes.clear()
        return seconds, nbytes

    def take_spans(self) -> list[Span]:
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def close(self) -> dict[str, Any]:
        return {}
