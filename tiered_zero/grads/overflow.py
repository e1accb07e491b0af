"""Decide whether to skip a step because its gradients are not finite."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from tiered_zero.config.schema import Config
from tiered_zero.errors import NonFiniteError
from tiered_zero.grads.check import GradCheck
from tiered_zero.grads.loss_scaler import LossScaler

logger = logging.getLogger("tiered_zero")

MAX_SKIPPED_IN_A_ROW = 100


@dataclass(frozen=True, kw_only=True)
class OverflowCounts:
    """Counts of steps. `nonfinite_in_a_row` includes steps that were applied because nothing checks for overflow."""

    skipped: int = 0
    skipped_in_a_row: int = 0
    nonfinite_in_a_row: int = 0


@final
class OverflowGuard:
    """Skips steps whose gradients are not finite, and adapts the loss scale. Driver thread. `checks`: False applies
    such steps with a warning, as plain PyTorch does in fp32."""

    def __init__(self, scaler: LossScaler | None, checks: bool) -> None:
        self.scaler = scaler
        self._checks = checks
        self.counts = OverflowCounts()

    @classmethod
    def from_config(cls, config: Config) -> OverflowGuard:
        scaler = LossScaler(config.fp16) if config.fp16.enabled else None
        return cls(scaler, scaler is not None or (config.bf16.enabled and config.bf16.check_grad_overflow))

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    def state(self) -> tuple[OverflowCounts, Mapping[str, Any] | None]:
        return self.counts, self.scaler.state_dict() if self.scaler is not None else None

    def restore(self, state: tuple[OverflowCounts, Mapping[str, Any] | None]) -> None:
        """Restore what `state()` returned before a step that is dropped."""
        self.counts, scaler_state = state
        if self.scaler is not None and scaler_state is not None:
            self.scaler.load_state_dict(scaler_state)

    def allows(self, check: GradCheck, step: int) -> bool:
        """Count the gradient check of `step`, update the loss scale, and return whether to apply the step. Raises
        NonFiniteError if training cannot go on; the step is counted then, too."""
        counts = self.counts
        in_a_row = 0 if check.finite else counts.nonfinite_in_a_row + 1
        warns = in_a_row & (in_a_row - 1) == 0  # warn at 1, 2, 4, ... in a row
        if check.finite or not self._checks:
            if not check.finite and warns:
                logger.warning("step %d: the gradient of %s is not finite", step, check.first_bad)
            self.counts = replace(counts, nonfinite_in_a_row=in_a_row, skipped_in_a_row=0)
            if self.scaler is not None:
                self.scaler.update(False)
            return True
        skipped_in_a_row = counts.skipped_in_a_row + 1
        self.counts = OverflowCounts(
            skipped=counts.skipped + 1, skipped_in_a_row=skipped_in_a_row, nonfinite_in_a_row=in_a_row
        )
        scale = self.loss_scale
        if self.scaler is not None:
            try:
                self.scaler.update(True)
            except NonFiniteError as error:
                raise NonFiniteError(f"{error} First parameter with such a gradient: {check.first_bad}.") from error
        if warns:
            logger.warning(
                "step %d skipped: gradient of %s is not finite (%d in a row; stops at %d)%s",
                step, check.first_bad, skipped_in_a_row, MAX_SKIPPED_IN_A_ROW,
                f"; loss scale {scale:g} -> {self.loss_scale:g}" if self.scaler is not None else "",
            )  # fmt: skip
        if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{skipped_in_a_row} steps in a row had gradients that are not finite, first in {check.first_bad}. "
                "Weights are as they were before them. Lower the learning rate, look at the data, or use bf16 for fp16."
            )
        return False
