"""The fp16 loss scale, static or dynamic, after DeepSpeed's rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tiered_zero.config.schema import Fp16Section
from tiered_zero.errors import ConfigError, NonFiniteError

_FACTOR = 2.0


class LossScaler:
    """`scale` multiplies the loss; `update` is called once a step with whether the gradients overflowed.

    `loss_scale` > 0 is static. 0 is dynamic, from 2**initial_scale_power: an overflow uses up one of `hysteresis`
    credits, and the last credit stays: from then on every overflow halves the scale, down to `min_loss_scale`. The
    scale doubles when the steps since the last overflow, less one, are a positive multiple of `loss_scale_window`.
    Credits are refilled when the scale doubles, or, with `consecutive_hysteresis`, by every good step.
    Source: DeepSpeed 0.19, runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale.
    """

    def __init__(
        self,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        if not (math.isfinite(loss_scale) and loss_scale >= 0):
            raise ConfigError(f"fp16.loss_scale must be 0 (dynamic) or a finite number above 0; found {loss_scale}.")
        self.dynamic = loss_scale == 0
        self.scale = 2.0**initial_scale_power if self.dynamic else float(loss_scale)
        if self.dynamic:
            for key, value in {"loss_scale_window": loss_scale_window, "hysteresis": hysteresis}.items():
                if value < 1:
                    raise ConfigError(f"fp16.{key} must be at least 1 for a dynamic loss scale; found {value}.")
            if not 0 < min_loss_scale <= self.scale:
                raise ConfigError(
                    f"fp16.min_loss_scale must be above 0 and at most the first loss scale, 2**{initial_scale_power}; "
                    f"found {min_loss_scale}. Lower it, or raise fp16.initial_scale_power."
                )
        self._window = loss_scale_window
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._min_scale = float(min_loss_scale)
        self._step = 0
        self._last_overflow = -1
        self._credits = hysteresis

    @classmethod
    def from_config(cls, section: Fp16Section) -> LossScaler:
        """From the fp16 section of the config."""
        return cls(
            section.loss_scale,
            section.initial_scale_power,
            section.loss_scale_window,
            section.hysteresis,
            section.consecutive_hysteresis,
            section.min_loss_scale,
        )

    def update(self, overflow: bool) -> None:
        """End of a step: adapt `scale`. Raises NonFiniteError, and stays as it is, on an overflow at the floor."""
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            self._last_overflow = self._step
        else:
            good_steps = self._step - self._last_overflow - 1
            grows = good_steps > 0 and good_steps % self._window == 0
            if grows:
                self.scale *= _FACTOR
            if grows or self._consecutive:
                self._credits = self._hysteresis
        self._step += 1

    def _shrink(self) -> None:
        if self._credits > 1:
            self._credits -= 1
            return
        if self.scale == self._min_scale:
            raise NonFiniteError(
                f"A loss scale at which gradients are finite was expected; they overflowed at the floor, "
                f"fp16.min_loss_scale = {self._min_scale:g}, in step {self._step + 1}. Look for a loss that is not "
                f"finite, lower the learning rate, lower fp16.min_loss_scale, or train in bf16."
            )
        self.scale = max(self.scale / _FACTOR, self._min_scale)

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers; with the same settings, `load_state_dict` continues bit for bit."""
        return {
            "scale": self.scale,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "credits": self._credits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state. A static scale stays what the config says, as the config is the later word."""
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
