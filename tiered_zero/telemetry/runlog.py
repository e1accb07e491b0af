"""Write a run's record (`tiered_zero.report`) and trace (`tiered_zero.trace`) step by step, and read a record.

A record has one JSON object per line: a header, a line per step, a footer. Lines after the header may be missing,
and an incomplete last line is ignored. A trace has Chrome's format, for Perfetto. The closing bracket of its array may
be missing. So both can be read after a kill.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.system import opened
from tiered_zero.telemetry.report import JsonRecord, RunReport, RunTotals, StepReport
from tiered_zero.telemetry.spans import LANES, WAIT_CAUSES, Recorder, Span, is_wait

logger = logging.getLogger("tiered_zero")

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunHeader(JsonRecord):
    """The first line of a record: facts known before the first step. `planned_nbytes`: tier -> kind -> bytes.
    `meanings`: tier -> kind -> the plan's description of the kind. `config`: key -> value as JSON, without defaults.
    `predicted`: "tokens" -> tokens of a step, "step" -> its predicted seconds, each lane -> its predicted busy seconds.
    `started_at`: Unix time."""

    model: str
    num_parameters: int
    planned_nbytes: dict[str, dict[str, int]] = field(default_factory=dict)
    meanings: dict[str, dict[str, str]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    version: int = FORMAT_VERSION

    @property
    def planned_by_tier(self) -> dict[str, int]:
        return {tier: sum(kinds.values()) for tier, kinds in self.planned_nbytes.items()}


@dataclass(kw_only=True)
class RunRecord:
    """The record of a run as read from its file. `end_save_s`: seconds of saves after the last step; None if the run
    was interrupted, or its disk was full."""

    header: RunHeader
    steps: list[StepReport] = field(default_factory=list)
    end_save_s: float | None = None

    @property
    def report(self) -> RunReport:
        """The run's report, computed from its steps."""
        totals = RunTotals(self.header.planned_by_tier, self.header.predicted)
        for step in self.steps:
            totals.add(step)
        return totals.report()


class PrivateFile:
    """A text file with mode 0600, written during training. The constructor renames an existing file. If a write fails,
    for example on a full disk, the file is closed with a warning, and training goes on."""

    def __init__(self, path: str | os.PathLike[str], setting: str) -> None:
        """Create the file. `setting`: the config key that names the file, for messages. Raises ConfigError."""
        self._name, self._setting = os.fspath(path), setting
        self._nbytes = 0
        try:
            self._keep_former()
            self._fd = opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{setting}: expected a file that can be written; {self._name}: {error.strerror}. "
                "Name one in a directory that exists."
            ) from error

    def _keep_former(self) -> None:
        """Rename an existing file, such as that of a resumed run: run.jsonl becomes run-1.jsonl."""
        path = Path(self._name)
        if not path.is_file() or not path.stat().st_size:
            return
        kept = next(name for number in count(1) if not (name := path.with_stem(f"{path.stem}-{number}")).exists())
        path.rename(kept)
        logger.warning("%s: %s was there already; it is %s now", self._setting, path, kept)

    @property
    def closed(self) -> bool:
        return self._fd.closed

    def write(self, text: str) -> None:
        """Write `text` without a buffer, so that it survives a kill. Never raises OSError. Does nothing if the file is
        closed."""
        if self.closed:
            return
        data = memoryview(text.encode())
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            self._nbytes += len(text.encode())
        except OSError as error:
            logger.warning(
                "%s: %s cannot be written any more (%s); it ends here, and training goes on",
                self._setting, self._name, error.strerror or error,
            )  # fmt: skip
            with suppress(OSError):
                os.ftruncate(self._fd, self._nbytes)  # remove a partial entry
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent. Logs a warning if closing fails, as on a full disk."""
        try:
            self._fd.close()
        except OSError as error:
            logger.warning("%s: %s may be cut: %s", self._setting, self._name, error.strerror or error)


class RunLog:
    """Writes a run's record to a file. Used by one thread. Raises ConfigError."""

    def __init__(self, header: RunHeader, path: str | os.PathLike[str]) -> None:
        self._file = PrivateFile(path, "tiered_zero.report")
        self._write("header", header.to_json())

    def add(self, report: StepReport) -> None:
        self._write("step", report.to_json())

    def close(self, end_save_s: float = 0.0) -> None:
        """Write the footer, and close the file. Idempotent. `end_save_s`: see RunRecord."""
        self._write("footer", {"end_save_s": end_save_s})
        self._file.close()

    def _write(self, record: str, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"record": record, **values}, separators=(",", ":"), allow_nan=False) + "\n")


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Read a run's record from a file. If the file is not a record, raises StoreError, which names the line."""
    try:
        *lines, _cut_off = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"The record {path} cannot be read: {error}. Name the file of tiered_zero.report.") from error
    run: RunRecord | None = None
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            record = values.pop("record")
            if record == "header":
                run = RunRecord(header=RunHeader.from_json(values))
            elif run is None:
                raise StoreError("there is no header before it")
            elif record == "step":
                run.steps.append(StepReport.from_json(values))
            elif record == "footer":
                run.end_save_s = float(values["end_save_s"])
        except (ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
            raise StoreError(
                f"{path}, line {number}: expected a line of a run's record (tiered_zero.report); {error}. "
                "Name the file that a run has written there."
            ) from error
    if run is None:
        raise StoreError(
            f"{path} holds no run: expected a header in its first line. Name the file of tiered_zero.report."
        )
    return run


_PROCESS = 1
_ROWS_A_LANE = 1000
"""Number of thread ids that a trace reserves for the rows of one lane. A lane needs fewer rows, because it has fewer
requests in flight."""


class RowLayout:
    """Assigns spans to the rows of a chart. Each lane and each named wait has one row, or more if its spans overlap. A
    span that lies inside another may share its row."""

    def __init__(self) -> None:
        self._rows: dict[str, list[_Row]] = {name: [] for name in (*LANES, *WAIT_CAUSES)}

    def place(self, span: Span) -> tuple[str, int]:
        """Assign a span to a row. Return the name of the span's lane or wait, and the row's index within it. Call this
        in the order of the spans' starts; of spans with the same start, the longest first."""
        name = span.kind if is_wait(span.kind) else span.lane
        rows = self._rows.setdefault(name, [])
        for index, row in enumerate(rows):
            if row.take(span):
                return name, index
        rows.append(_Row())
        rows[-1].take(span)
        return name, len(rows) - 1

    def order(self, name: str) -> int:
        """Return the position of the lane or wait `name` in the chart, from 0."""
        return list(self._rows).index(name)


class _Row:
    """One row of a chart. Two spans of a row do not overlap, unless one lies inside the other."""

    def __init__(self) -> None:
        self._last_start_s = -math.inf
        self._ends: list[float] = []

    def take(self, span: Span) -> bool:
        """Add the span to the row if it fits, and return whether it does."""
        if span.start_s < self._last_start_s:
            return False
        while self._ends and self._ends[-1] <= span.start_s:
            self._ends.pop()
        if self._ends and span.end_s > self._ends[-1]:
            return False
        self._last_start_s = span.start_s
        self._ends.append(span.end_s)
        return True


class TraceWriter:
    """Writes spans to a trace file. Used by one thread. `metadata`: labels of the trace. Raises ConfigError."""

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        self._file = PrivateFile(path, "tiered_zero.trace")
        self._layout = RowLayout()
        self._threads: set[int] = set()
        self._file.write("[\n")
        labels = ", ".join(f"{name} {text}" for name, text in (metadata or {}).items())
        self._write([_about("process_name", 0, name="tiered_zero"), _about("process_labels", 0, labels=labels)])

    def write(self, spans: Iterable[Span]) -> None:
        """Write spans without a buffer, so that they survive a kill. Does nothing if the trace is closed."""
        if self._file.closed:
            return
        events: list[dict[str, Any]] = []
        for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
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
        """Close the trace. Idempotent."""
        if not self._file.closed:
            self._write([_about("process_sort_index", 0, sort_index=0)], end="\n]\n")
            self._file.close()

    def _write(self, events: Iterable[dict[str, Any]], end: str = ",\n") -> None:
        text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        if text:
            self._file.write(text + end)


def _about(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": args}


class RunObserver:
    """Writes each step to the run's record and trace. `report_path`, `trace_path`: their files; None: no file. If
    there is a trace, makes the recorder keep spans. Raises ConfigError."""

    def __init__(self, recorder: Recorder, header: RunHeader, report_path: str | None, trace_path: str | None) -> None:
        self._recorder = recorder
        self._log = RunLog(header, report_path) if report_path is not None else None
        try:
            facts = {"model": header.model, **header.facts}
            self._trace = TraceWriter(trace_path, facts) if trace_path is not None else None
        except Exception:
            if self._log is not None:
                self._log.close()
            raise
        recorder.keep_spans = self._trace is not None

    def __call__(self, report: StepReport) -> None:
        if self._trace is not None:
            self._trace.write(self._recorder.take_spans())
        if self._log is not None:
            self._log.add(report)

    def close(self) -> None:
        """Write the remaining spans and the footer. Idempotent."""
        if self._trace is not None:
            self._trace.write(self._recorder.take_spans())
            self._trace.close()
        if self._log is not None:
            self._log.close(self._recorder.take_totals().causes.get("save", 0.0))
