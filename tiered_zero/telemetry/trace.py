"""A Chrome trace of the run, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Written in the format's array form, whose closing bracket may be missing: a killed run leaves a file that opens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from tiered_zero.telemetry.runlog import PrivateFile
from tiered_zero.telemetry.spans import LANES, WAIT_CAUSES, Span, is_wait

_PROCESS = 1
_ROWS_A_LANE = 1000
"""Thread ids of one lane's rows; more requests than that are not in flight at once."""


class RowLayout:
    """Places spans on rows: one for each lane and named wait, more where spans overlap without being nested."""

    def __init__(self) -> None:
        self._rows: dict[str, list[_Row]] = {name: [] for name in (*LANES, *WAIT_CAUSES)}

    def place(self, span: Span) -> tuple[str, int]:
        """The lane's or wait's name and the index of the row. Give spans of a batch by start, the longer one first."""
        name = span.kind if is_wait(span.kind) else span.lane
        rows = self._rows.setdefault(name, [])
        for index, row in enumerate(rows):
            if row.take(span):
                return name, index
        rows.append(_Row())
        rows[-1].take(span)
        return name, len(rows) - 1

    def order(self, name: str) -> int:
        """Return the place of the lane or wait among all that are known."""
        return list(self._rows).index(name)


class _Row:
    """Spans in the order of their start, each after or inside those before it."""

    def __init__(self) -> None:
        self._last_start_s = -math.inf
        self._ends: list[float] = []

    def take(self, span: Span) -> bool:
        """Whether the span fits; if so it is part of the row."""
        if span.start_s < self._last_start_s:
            return False
        while self._ends and self._ends[-1] <= span.start_s:
            self._ends.pop()
        if self._ends and span.end_s > self._ends[-1]:
            return False
        self._last_start_s = span.start_s
        self._ends.append(span.end_s)
        return True


def by_start(spans: Iterable[Span]) -> list[Span]:
    """Outer spans before those inside them."""
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


class TraceWriter:
    """Appends spans as they are taken from the recorder. One thread.

    Raises ConfigError if the file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        cut = json.dumps(_about("process_sort_index", 0, sort_index=0, cut="the trace could not be written on"))
        self._file = PrivateFile(path, "tiered_zero.trace", f"{cut}\n]\n")
        self._layout = RowLayout()
        self._threads: set[int] = set()
        self._file.write("[\n")
        labels = ", ".join(f"{name} {text}" for name, text in (metadata or {}).items())
        self._write([_about("process_name", 0, name="tiered_zero"), _about("process_labels", 0, labels=labels)])

    def write(self, spans: Iterable[Span]) -> None:
        """Flushed when it returns, so that these spans survive a kill. Nothing once it is closed."""
        if self._file.closed:
            return
        events: list[dict[str, Any]] = []
        for span in by_start(spans):
            name, row = self._layout.place(span)
            thread = (1 + self._layout.order(name)) * _ROWS_A_LANE + row
            if thread not in self._threads:
                self._threads.add(thread)
                events.append(_about("thread_name", thread, name=name if row == 0 else f"{name} ({row + 1})"))
                events.append(_about("thread_sort_index", thread, sort_index=thread))
            args = {"lane": span.lane, "bytes": span.nbytes} if span.nbytes else {"lane": span.lane}
            events.append(
                {"ph": "X", "pid": _PROCESS, "tid": thread, "name": span.name, "cat": span.kind or span.lane}
                | {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6, "args": args}
            )
        self._write(events)

    def close(self) -> None:
        """Idempotent."""
        if not self._file.closed:
            self._write([_about("process_sort_index", 0, sort_index=0)], end="\n]\n")
            self._file.close()

    def _write(self, events: Iterable[dict[str, Any]], end: str = ",\n") -> None:
        text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        if text:
            self._file.write(text + end)


def _about(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": args}
