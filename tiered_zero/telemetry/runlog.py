"""The run's record on disk: one JSON object per line; a header, a line per step, one step's timeline, a footer.

The header comes first; any other line may be missing, and a last line that is cut off (the run was killed) is left out.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.system.resources import opened
from tiered_zero.telemetry.report import JsonRecord, RunReport, RunTotals, StepReport
from tiered_zero.telemetry.spans import Span

logger = logging.getLogger("tiered_zero")

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunHeader(JsonRecord):
    """Facts known before the first step. `planned_nbytes`: tier -> kind -> bytes. `facts`: any more, name -> text."""

    model: str
    num_parameters: int
    planned_nbytes: dict[str, dict[str, int]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    open_settings: list[str] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)
    version: int = FORMAT_VERSION

    @property
    def planned_by_tier(self) -> dict[str, int]:
        return {tier: sum(kinds.values()) for tier, kinds in self.planned_nbytes.items()}


_COLUMNS = tuple(field.name for field in fields(Span))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The spans of one step, in perf_counter seconds; a row of its JSON has a span's fields in their order."""

    step: int
    spans: list[Span]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "spans": [[getattr(span, name) for name in _COLUMNS] for span in self.spans]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Timeline:
        spans = [Span(**dict(zip(_COLUMNS, row, strict=True))) for row in values["spans"]]
        return cls(step=int(values["step"]), spans=spans)


@dataclass(kw_only=True)
class RunRecord:
    """A record read back. `footer` is None if the run did not end by itself."""

    header: RunHeader
    steps: list[StepReport] = field(default_factory=list)
    timeline: Timeline | None = None
    footer: RunReport | None = None
    is_cut: bool = False
    """It could not be written to its end (a full disk), though the run went on."""

    @property
    def report(self) -> RunReport:
        """The footer, or what the steps add up to."""
        if self.footer is not None:
            return self.footer
        totals = RunTotals(self.header.planned_by_tier, self.header.open_settings)
        for step in self.steps:
            totals.add(step)
        return totals.report()


class PrivateFile:
    """A text file with mode 0600, written during training. A file that is there is renamed.

    The first failed write (a full disk) logs one warning, cuts the file after its last whole entry and closes it;
    training goes on.
    """

    def __init__(self, path: str | os.PathLike[str], setting: str, cut_mark: str) -> None:
        """A new file (0600). `setting`: its name in the config. `cut_mark`: the last text of a file that is
        cut; it may be missing where not even that can be written. Raises ConfigError."""
        self._name, self._setting, self._cut_mark = os.fspath(path), setting, cut_mark.encode()
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
        """Rename a file that is there, as that of the run which is resumed: run.jsonl -> run-1.jsonl."""
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
        """Hand the text to the system, so that it survives a kill. Raises nothing; nothing happens once closed."""
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
                os.ftruncate(self._fd, self._nbytes)  # a part of an entry goes, and leaves room for the mark
                os.pwrite(self._fd, self._cut_mark, self._nbytes)
            self.close()

    def close(self) -> None:
        """Idempotent. Logs a warning where the disk reports only now that it is full."""
        try:
            self._fd.close()
        except OSError as error:
            logger.warning("%s: %s may be cut: %s", self._setting, self._name, error.strerror or error)


class RunLog:
    """Adds a run up, and writes it where a path is given. One thread.

    Raises ConfigError if the file cannot be made.
    """

    def __init__(self, header: RunHeader, path: str | os.PathLike[str] | None = None) -> None:
        self._totals = RunTotals(header.planned_by_tier, header.open_settings)
        self._file = PrivateFile(path, "tiered_zero.report", '{"record":"cut"}\n') if path is not None else None
        self._write("header", header.to_json())

    def add(self, report: StepReport) -> None:
        self._totals.add(report)
        self._write("step", report.to_json())

    def add_timeline(self, timeline: Timeline) -> None:
        self._write("timeline", timeline.to_json())

    def report(self) -> RunReport:
        """Return the report of the steps added so far."""
        return self._totals.report()

    def close(self) -> None:
        """Write the footer. Idempotent."""
        self._write("footer", self.report().to_json())
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: str, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"record": record, **values}, separators=(",", ":"), allow_nan=False) + "\n")


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Raises StoreError, with the line, where the file is not a run's record."""
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
            elif record == "timeline":
                run.timeline = Timeline.from_json(values)
            elif record == "footer":
                run.footer = RunReport.from_json(values)
            elif record == "cut":
                run.is_cut = True
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
