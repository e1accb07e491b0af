"""Connect to Transformers' Trainer with two callbacks: one saves optimizer state, one logs bytes and busy shares."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tiered_zero.optim import OffloadedOptimizer
from tiered_zero.sizes import parse_nbytes

_FOLDER = "optimizer_state"


class SaveStateCallback(TrainerCallback):
    """Writes an OffloadedOptimizer's state to `checkpoint-N/optimizer_state`, and reads it when Trainer resumes.
    Collects a ZeroRedundancyOptimizer's state on rank 0 before a save; the state must fit into host memory there.
    `resume_from`: the checkpoint of `train(resume_from_checkpoint=...)`, if it is outside `args.output_dir`."""

    def __init__(self, resume_from: str | None = None) -> None:
        self._resume_from = resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Read an OffloadedOptimizer's state from files if Trainer resumes. Make its `state_dict()` write the state to
        files, until `on_train_end`."""
        own = unwrapped(optimizer)
        if not isinstance(own, OffloadedOptimizer):
            return
        if own.awaits_files:
            named = [Path(path) / _FOLDER for path in (self._resume_from, args.resume_from_checkpoint) if path]
            own.load_state(next((path for path in named if path.is_dir()), _folder(args, state)))
        saved = weakref.proxy(own)
        # Trainer calls it before it removes older checkpoints, so that one whole checkpoint always exists
        vars(own)["state_dict"] = lambda: saved.save_state_dict(_folder(args, state))

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Collect a ZeroRedundancyOptimizer's state on rank 0 before a save. Every rank must call this."""
        if control.should_save and not args.save_only_model:
            _consolidate(optimizer)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Collect a ZeroRedundancyOptimizer's state on rank 0 if Trainer may save after this evaluation."""
        if args.save_strategy == "best" and not args.save_only_model:
            _consolidate(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Give the optimizer its own `state_dict()` back. `on_train_begin` has replaced it."""
        vars(unwrapped(optimizer)).pop("state_dict", None)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrapper, or `optimizer` itself."""
    return getattr(optimizer, "optimizer", optimizer)


def _consolidate(optimizer: Any) -> None:
    if hasattr(own := unwrapped(optimizer), "consolidate_state_dict"):
        own.consolidate_state_dict()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / _FOLDER


class ReportCallback(TrainerCallback):
    """Adds numbers to each training log: GiB on each tier, the busy share of each lane in the last step, and GB that
    this process has written to disk. `engine`: the engine, if one steps the optimizer. `rated`: the bytes that the
    drive is rated to write, such as "600TB"; with it, the used share of this rating is logged too. Loggers that run
    before this callback miss the numbers; `state.log_history` has them."""

    def __init__(self, engine: Any = None, rated: str | int | None = None) -> None:
        self._engine = engine
        self._rated = None if rated is None else parse_nbytes(rated)
        self._written = 0

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Count the bytes that the step has written."""
        if (report := _report(self._engine, optimizer)) is not None:
            self._written += report.link_nbytes.get("disk write", 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Add this callback's numbers (see the class) to `logs` and to the state's history, if `logs` has a loss."""
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
    """Return the last step's report, from the engine or else from the optimizer; None if there is none."""
    own = unwrapped(optimizer)
    return getattr(engine or getattr(own, "optim", own), "step_report", None)
