"""Adapt the fp16 loss scale, static or dynamic, as DeepSpeed does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tiered_zero.config.schema import Fp16Section
from tiered_zero.errors import ConfigError, NonFiniteError

_FACTOR = 2.0


class LossScaler:
    """Holds `scale`, the factor of the loss. Call `update` once a step with whether the gradients overflowed.

    `loss_scale` > 0 is static. 0 is dynamic, starting at 2**initial_scale_power. Each overflow uses up one of
    `hysteresis` credits, except the last: from then on every overflow halves the scale, down to `min_loss_scale`. The
    scale doubles when the steps since the last overflow, less one, are a positive multiple of `loss_scale_window`.
    Credits are refilled when the scale doubles, or, with `consecutive_hysteresis`, by every good step.

    Source: DeepSpeed 0.19, runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale.
    """

    def __init__(self, section: Fp16Section) -> None:
        """Raises ConfigError if the floor is above the first scale; the section has checked the rest."""
        power, floor = section.initial_scale_power, section.min_loss_scale
        self.dynamic = section.loss_scale == 0
        self.scale = 2.0**power if self.dynamic else float(section.loss_scale)
        if self.dynamic and floor > self.scale:
            raise ConfigError(
                f"fp16.min_loss_scale must be above 0 and at most the first loss scale, 2**{power}; found {floor}. "
                "Lower it, or raise fp16.initial_scale_power."
            )
        self._section = section
        self._step = 0
        self._last_overflow = -1
        self._credits = section.hysteresis

    def update(self, overflow: bool) -> None:
        """Adapt `scale` at the end of a step. Raises NonFiniteError, without a change, on an overflow at the floor."""
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            self._last_overflow = self._step
        else:
            good_steps = self._step - self._last_overflow - 1
            grows = good_steps > 0 and good_steps % self._section.loss_scale_window == 0
            if grows:
                self.scale *= _FACTOR
            if grows or self._section.consecutive_hysteresis:
                self._credits = self._section.hysteresis
        self._step += 1

    def _shrink(self) -> None:
        if self._credits > 1:
            self._credits -= 1
            return
        floor = float(self._section.min_loss_scale)
        if self.scale == floor:
            raise NonFiniteError(
                f"A loss scale at which gradients are finite was expected; they overflowed at the floor, "
                f"fp16.min_loss_scale = {floor:g}, in step {self._step + 1}. Look for a loss that is not "
                f"finite, lower the learning rate, lower fp16.min_loss_scale, or train in bf16."
            )
        self.scale = max(self.scale / _FACTOR, floor)

    def state_dict(self) -> dict[str, float | int]:
        """Return plain numbers. With the same settings, `load_state_dict` continues from them bit for bit."""
        counts = {"step": self._step, "last_overflow": self._last_overflow, "credits": self._credits}
        return {"scale": self.scale, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. A static scale keeps the config's value, which is the newer one."""
        if not self.dynamic:
            return
        missing = self.state_dict().keys() - state.keys()
        if missing or not (math.isfinite(state["scale"]) and state["scale"] > 0):
            raise ConfigError(
                f"A loss scaler state needs a finite scale, step, last_overflow and credits; found {dict(state)}. "
                "Resume from another checkpoint."
            )
        self.scale = float(state["scale"])
        self._step = int(state["step"])
        self._last_overflow = int(state["last_overflow"])
        self._credits = int(state["credits"])
