"""Check a step's gradients: compute their norm and the clip factor, adapt the loss scale, and skip steps that
overflow."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from tiered_zero.config.schema import Config, Fp16Section
from tiered_zero.errors import ConfigError, NonFiniteError
from tiered_zero.layout.flat import ParamSpec, Unit

logger = logging.getLogger("tiered_zero")

CPU = torch.device("cpu")
MAX_SKIPPED_IN_A_ROW = 100
_FACTOR = 2.0
"""The factor by which the loss scale changes."""

SQUARES_CHUNK_NUMEL = 1 << 18
"""The number of squares that are added at once. In fp64 the values and their squares take 2 MiB each. The number also
fixes the order of additions."""

NONE_BAD = -1
Norm = float | torch.Tensor
"""The fp32 norm of a gradient: a float, or a 0-d tensor on the device that computed the norm."""


def span_squares(values: torch.Tensor, span: range, unit: Unit) -> dict[int, list[torch.Tensor]]:
    """Return the sums of squares of each parameter's gradient, by parameter index. There is one sum for each chunk of
    SQUARES_CHUNK_NUMEL elements, a 0-d fp64 tensor on the device of `values`. Does not wait for the device. `values`:
    [n], elements `span` of the unit's averaged gradients."""
    squares: dict[int, list[torch.Tensor]] = {entry.param.index: [] for entry in unit.entries}
    for entry in unit.entries:
        stop = min(entry.stop, span.stop)
        for start in range(max(entry.start, span.start), stop, SQUARES_CHUNK_NUMEL):
            last = min(start + SQUARES_CHUNK_NUMEL, stop)
            part = values[start - span.start : last - span.start].double()
            squares[entry.param.index].append((part * part).sum())
    return squares


@dataclass(frozen=True, kw_only=True)
class GradCheck:
    """The result of a gradient check. `norm`: the global L2 norm of the unscaled gradients. `grad_scale`: the factor by
    which the update unscales and clips gradients. `first_bad`: the first parameter with a gradient that is not finite;
    None if all gradients are finite."""

    finite: bool
    norm: float
    grad_scale: float
    first_bad: str | None = None


def check_gradients(
    norms: Sequence[tuple[ParamSpec, Norm]],
    loss_scale: float,
    max_norm: float,
    device: torch.device = CPU,
) -> GradCheck:
    """Compute the global norm and the clip factor of one rank's gradients, in fp32, as torch.nn.utils.clip_grad_norm_
    does.

    `norms`: in the order of `model.parameters()`. `loss_scale`: the factor by which the gradients are multiplied; the
    returned norm is without this factor. `max_norm`: the largest norm that is not clipped; 0: never clip. `device`: the
    device of compute, on which the norms are added up. The host waits for this device once."""
    on_host = torch.tensor([norm for _, norm in norms if isinstance(norm, float)], dtype=torch.float32, device="cpu")
    numbers = iter(on_host.to(device).unbind())
    values = [next(numbers) if isinstance(norm, float) else norm.to(device) for _, norm in norms]
    stacked = torch.stack(values) if values else torch.zeros(0, device=device)
    found = torch.cat([torch.linalg.vector_norm(stacked, 2).view(1), stacked]).cpu()
    total, stacked = found[0], found[1:]
    if loss_scale != 1.0:
        total = total / loss_scale
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).item() if max_norm > 0 else 1.0
    bad = None
    if not torch.isfinite(total):
        named = (spec.name for (spec, _), norm in zip(norms, stacked.tolist(), strict=True) if not math.isfinite(norm))
        bad = next(named, norms[0][0].name)
    return GradCheck(finite=bad is None, norm=total.item(), grad_scale=scale / loss_scale, first_bad=bad)


def check_squares(squares: float, first_bad: str | None, loss_scale: float, max_norm: float) -> GradCheck:
    """Return the norm, the clip factor and the finiteness of gradients averaged over many ranks. `squares`: the fp64
    sum of squares over all ranks, of gradients multiplied by `loss_scale`. `first_bad`: the name of the first parameter
    with a gradient that is not finite, or None. `max_norm`: the largest norm that is not clipped; 0: never clip."""
    finite = first_bad is None
    norm = math.sqrt(squares) / loss_scale if squares >= 0 else math.nan
    total = torch.tensor(norm, dtype=torch.float64, device="cpu")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).item() if max_norm > 0 else 1.0
    return GradCheck(finite=finite, norm=norm, grad_scale=scale / loss_scale, first_bad=first_bad)


class LossScaler:
    """Adapts `scale`, the factor by which the loss is multiplied, at the end of each step.

    fp16.loss_scale > 0 is a fixed scale. 0 means a dynamic scale. It starts at 2**initial_scale_power and doubles after
    every `loss_scale_window` steps without overflow. The first step after the start or an overflow is not counted.
    After the start, and after each doubling, the first `hysteresis` - 1 overflows leave the scale unchanged. Each
    further overflow halves the scale, down to `min_loss_scale`. With `consecutive_hysteresis`, each step without
    overflow restarts the count of overflows.

    Source: DeepSpeed 0.19, runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale."""

    def __init__(self, section: Fp16Section) -> None:
        """Set the first scale. Raises ConfigError if it is dynamic and below `min_loss_scale`."""
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
        """Adapt `scale` at the end of a step. `overflow`: whether the step had gradients that are not finite. Raises
        NonFiniteError, with nothing changed, if an overflow would lower a scale that is already `min_loss_scale`."""
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            self._last_overflow = self._step
        else:
            good_steps = self._step - self._last_overflow - 1  # without the first one, as in DeepSpeed
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
        """Return the state as plain numbers. With the same config, `load_state_dict` continues exactly from this
        state."""
        counts = {"step": self._step, "last_overflow": self._last_overflow, "credits": self._credits}
        return {"scale": self.scale, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, the result of `state_dict()`. Do nothing if the scale is fixed. Raises ConfigError if
        `state` is incomplete, or if its scale is not a finite number above 0."""
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


@dataclass(frozen=True, kw_only=True)
class OverflowCounts:
    """The numbers of bad steps (steps with gradients that are not finite). `skipped`: all bad steps that were skipped.
    `skipped_in_a_row`: bad steps skipped since a step was last applied. `nonfinite_in_a_row`: bad steps, skipped or
    applied, since the last step with finite gradients."""

    skipped: int = 0
    skipped_in_a_row: int = 0
    nonfinite_in_a_row: int = 0


@final
class OverflowGuard:
    """Decides whether to skip a step, and adapts the loss scale. Used on the driver thread; `loss_scale` also on
    autograd's. `scaler`: adapts the loss scale; None without fp16. `checks`: whether to skip steps with gradients that
    are not finite. If False, such steps are applied, as in plain PyTorch, with a warning."""

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
        """Set counts and loss scale back to `state`, a result of `state()`."""
        self.counts, scaler_state = state
        if self.scaler is not None and scaler_state is not None:
            self.scaler.load_state_dict(scaler_state)

    def allows(self, check: GradCheck) -> bool:
        """Return whether to apply the step whose gradients `check` has checked."""
        return check.finite or not self._checks

    def count(self, check: GradCheck, step: int) -> None:
        """Count a step that is applied or skipped, and adapt the loss scale. Raises NonFiniteError, after counting, if
        the loss scale cannot be lowered or if MAX_SKIPPED_IN_A_ROW steps in a row were skipped."""
        counts = self.counts
        in_a_row = 0 if check.finite else counts.nonfinite_in_a_row + 1
        warns = in_a_row & (in_a_row - 1) == 0  # warn at 1, 2, 4, ... in a row
        if self.allows(check):
            if not check.finite and warns:
                logger.warning("step %d: the gradient of %s is not finite", step, check.first_bad)
            self.counts = replace(counts, nonfinite_in_a_row=in_a_row, skipped_in_a_row=0)
            if self.scaler is not None:
                self.scaler.update(False)
            return
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
