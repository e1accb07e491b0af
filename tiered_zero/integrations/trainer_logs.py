"""Add to the logs of Transformers' Trainer a step's bytes by tier, and the share of time that each link was busy."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tiered_zero.integrations.trainer import unwrapped
from tiered_zero.sizes import parse_nbytes


class ReportCallback(TrainerCallback):
    """Adds to each line of training logs: GiB on each tier, the busy share of each link in the last step (the largest
    binds the step), GB written to the disk by this process, and these GB as a share of `rated` ("600TB", the drive's
    endurance). `engine`: the engine, if one steps the optimizer. Loggers before this callback, such as those of
    `report_to`, miss the numbers; `state.log_history` has them."""

    def __init__(self, engine: Any = None, rated: str | int | None = None) -> None:
        self._engine = engine
        self._rated = None if rated is None else parse_nbytes(rated)
        self._written = 0

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Count the bytes that the step has written."""
        if (report := _report(self._engine, optimizer)) is not None:
            self._written += report.link_nbytes.get("disk write", 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Add the last step's bytes by tier, and how busy each link was, to `logs`, if `logs` has a loss."""
        report = _report(self._engine, optimizer)
        if report is None or "loss" not in logs:
            return
        numbers = {f"tiered_zero/{tier}_gib": nbytes / 2**30 for tier, nbytes in report.tier_nbytes.items()}
        numbers |= {f"tiered_zero/busy/{lane}": busy_s / report.wall_s for lane, busy_s in report.busy_s.items()}
        numbers["tiered_zero/written_gb"] = self._written / 1e9
        if self._rated is not None:
            numbers["tiered_zero/wear"] = self._written / self._rated
        logs.update(numbers)
        state.log_history[-1].update(numbers)


def _report(engine: Any, optimizer: Any) -> Any:
    """Return the last step's report from the engine, else from the optimizer; None if it has none."""
    own = unwrapped(optimizer)
    return getattr(engine or getattr(own, "optim", own), "step_report", None)
