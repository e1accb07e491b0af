"""What one step after another took, from what is counted while they run."""

from __future__ import annotations

import time
from typing import Any, SupportsFloat, final

from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.telemetry.report import StepReport, build_step_report
from tiered_zero.telemetry.spans import Recorder


@final
class StepMeter:
    """Collects losses and tokens of a step's micro-batches for its report. Driver thread."""

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._start_s = time.perf_counter()
        self.losses: list[SupportsFloat] = []
        self.num_tokens = 0
        self.report: StepReport | None = None
        """Of the last optimizer step."""

    def clear(self) -> None:
        """Drop what the step's micro-batches have counted: the step is dropped."""
        self.losses.clear()
        self.num_tokens = 0

    def finish(self, step: int, **facts: Any) -> None:
        """End an optimizer step. `facts`: grad_norm, loss_scale, skipped of `StepReport`."""
        now_s = time.perf_counter()
        losses, self.losses = self.losses, []
        tokens, self.num_tokens = self.num_tokens, 0
        self.report = build_step_report(
            step,
            self._recorder.take_totals(),
            now_s - self._start_s,
            self._ledger,
            loss=sum(float(loss) for loss in losses) / len(losses) if losses else None,
            tokens=tokens,
            **facts,
        )
        self._start_s = now_s
