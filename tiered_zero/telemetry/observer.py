"""Writers of a run's record and trace, a step at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunLog, Timeline
from tiered_zero.telemetry.spans import Recorder
from tiered_zero.telemetry.trace import TraceWriter

logger = logging.getLogger("tiered_zero")

TIMELINE_STEP = 3
"""The step of a process whose spans go into the record: by then the order of the units is known and fetched ahead."""


class StepLog:
    """Says a line of every `every`-th step; None: of none. `groups`: the live param groups.

    The line is asked for by name (steps_per_print), so it is printed where no handler of the logger would show it.
    """

    def __init__(self, every: int | None, groups: Sequence[Mapping[str, Any]]) -> None:
        self._every = every
        self._groups = groups

    def __call__(self, report: StepReport) -> None:
        if self._every is not None and report.step % self._every == 0:
            loss = "unknown" if report.loss is None else f"{report.loss:.6g}"
            rates = ", ".join(f"{float(group['lr']):.6g}" for group in self._groups) or "none"
            line = f"step {report.step}: loss {loss}, loss scale {report.loss_scale:g}, learning rate {rates}"
            if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
                logger.info("%s", line)
            else:
                print(line, flush=True)


class RunObserver:
    """Call it with each step's report, on the thread that steps. Turns the recorder's spans on when they are wanted.

    `report_path`, `trace_path`: None for none. Raises ConfigError if a file cannot be made.
    """

    def __init__(self, recorder: Recorder, header: RunHeader, report_path: str | None, trace_path: str | None) -> None:
        self._recorder = recorder
        self._log = RunLog(header, report_path)
        self._records = report_path is not None
        self._num_steps = 0
        try:
            facts = {"model": header.model, **header.facts}
            self._trace = TraceWriter(trace_path, facts) if trace_path is not None else None
        except Exception:
            self._log.close()
            raise
        self._keep_spans_for(1)

    def __call__(self, report: StepReport) -> None:
        spans = self._recorder.take_spans()
        self._log.add(report)
        self._num_steps += 1
        if self._trace is not None:
            self._trace.write(spans)
        if self._records and self._num_steps == TIMELINE_STEP:
            self._log.add_timeline(Timeline(step=report.step, spans=spans))
        self._keep_spans_for(self._num_steps + 1)

    def close(self) -> None:
        """Write what is left and the footer. Idempotent."""
        if self._trace is not None:
            self._trace.write(self._recorder.take_spans())
            self._trace.close()
        self._log.close()

    def _keep_spans_for(self, step: int) -> None:
        self._recorder.keep_spans = self._trace is not None or (self._records and step == TIMELINE_STEP)
