"""Learning rate schedules: DeepSpeed's five, by its formulas, and any of torch.optim.lr_scheduler.

A DeepSpeed schedule is a function of `last_batch_iteration` i: -1 at construction, which gives the groups their start
value; `step()`, to be called after each optimizer step, adds one and sets the rate for the next. The first `step()`
therefore evaluates i = 0. Formulas: deepspeed/runtime/lr_schedules.py of DeepSpeed 0.19.
"""

from __future__ import annotations

import difflib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tiered_zero.config import SchedulerSection
from tiered_zero.errors import ConfigError
from tiered_zero.rules.optimizer_copy import copied_group

_log = logging.getLogger(__name__)


class Schedule(ABC):
    """The surface of torch's LRScheduler, over `param_groups` only: it neither wraps nor patches the optimizer."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Compute the rate of each group at `last_batch_iteration`."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rate for the next optimizer step; to be called once after each."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Return the rate that each group has now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in DeepSpeed's format."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the iteration stored: set the rates that the groups had then."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._apply()

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


@final
class LRRangeTest(Schedule):
    """Find the largest useful rate: lr = min_lr * (1 + step_rate * t), t = (i + 1) / step_size, or its floor."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = _each_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self._step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self._step_rate = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self._step_size
        increase = 1 + self._step_rate * (math.floor(interval) if self._staircase else interval)
        return [lr * increase for lr in self._min_lrs]


class WarmupLR(Schedule):
    """Raise the rate from `warmup_min_lr` to `warmup_max_lr`, by default each group's own rate; then keep it.

    lr = low + (high - low) * gamma; gamma is that of the warmup, then `_gamma_after_warmup`. Before step 0: low.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] | None = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int | None = 1000,
        warmup_type: str | None = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._low = _each_group(optimizer, "warmup_min_lr", 0.0 if warmup_min_lr is None else warmup_min_lr)
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self._high = own if warmup_max_lr is None else _each_group(optimizer, "warmup_max_lr", warmup_max_lr)
        super().__init__(optimizer, last_batch_iteration)

    def _gamma_after_warmup(self, iteration: int) -> float:
        return 1.0

    def get_lr(self) -> list[float]:
        iteration = self.last_batch_iteration
        if iteration < 0:
            return list(self._low)
        warm = iteration >= self._warmup.num_steps
        gamma = self._gamma_after_warmup(iteration) if warm else self._warmup.gamma(iteration)
        return [low + (high - low) * gamma for low, high in zip(self._low, self._high, strict=True)]


@final
class WarmupDecayLR(WarmupLR):
    """Raise the rate from `warmup_min_lr` to `warmup_max_lr`, then lower it to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] | None = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 1e-3,
        warmup_num_steps: int | None = 1000,
        warmup_type: str | None = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma_after_warmup(self, iteration: int) -> float:
        decay_steps = max(1, self._total_num_steps - self._warmup.num_steps)
        return max(0.0, (self._total_num_steps - iteration) / decay_steps)


@final
class WarmupCosineLR(Schedule):
    """Multiply the groups' own rates: warmup from `warmup_min_ratio` to 1, then half a cosine to `cos_min_ratio`.

    Before step 0 the rate is 0, whatever `warmup_min_ratio` is, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int | None = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str | None = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_num_steps = total_num_steps
        self._warmup_min_ratio = warmup_min_ratio
        self._cos_min_ratio = cos_min_ratio
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        return [lr * self._ratio(self.last_batch_iteration) for lr in self._base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self._warmup.num_steps:
            return self._warmup_min_ratio + (1 - self._warmup_min_ratio) * self._warmup.gamma(iteration)
        decay_steps = max(1, self._total_num_steps - self._warmup.num_steps)
        progress = min(1.0, (iteration - self._warmup.num_steps + 1) / decay_steps)
        return max(0.0, self._cos_min_ratio + (1 - self._cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True, kw_only=True)
class CycleShape:
    """Options of OneCycle, in optimizer steps, and the form of its triangle."""

    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float | Sequence[float] = 0.8
    cycle_max_mom: float | Sequence[float] = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def __post_init__(self) -> None:
        _positive("cycle_first_step_size", self.cycle_first_step_size)
        if self.second_size != 0:  # then the rate falls at once
            _positive("cycle_second_step_size", self.second_size)

    @property
    def second_size(self) -> int:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def total_size(self) -> int:
        return self.cycle_first_step_size + self.second_size

    def height(self, iteration: int) -> float:
        """Return 0 at the foot of the triangle, 1 at its top; in stairs where `cycle_*_stair_count` is set."""
        position = (iteration + 1) % self.total_size
        stairs, size = self.cycle_first_stair_count, self.cycle_first_step_size
        if position > size:
            position, size = self.total_size - position, self.second_size
            stairs = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        return math.floor(position * stairs / size) / stairs if stairs > 0 else position / size

    def decay_intervals(self, iteration: int) -> float:
        """Count the `decay_step_size` since the triangle; 0 if nothing decays."""
        return (iteration - self.total_size + 1) / self.decay_step_size if self.decay_step_size else 0.0


@final
class OneCycle(Schedule):
    """Move the rate from min to max and back, and the momentum the other way; then decay both.

    Options: `CycleShape`. Momentum is betas[0] of an optimizer with `betas`; betas[1] becomes 0.99, as in DeepSpeed.
    """

    _BETA2 = 0.99

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        **options: Any,
    ) -> None:
        self.shape = CycleShape(**{name: value for name, value in options.items() if value is not None})
        self._min_lrs = _each_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self._max_lrs = _each_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self._min_moms = _each_group(optimizer, "cycle_min_mom", self.shape.cycle_min_mom)
        self._max_moms = _each_group(optimizer, "cycle_max_mom", self.shape.cycle_max_mom)
        self._cycles_momentum = self.shape.cycle_momentum and "betas" in optimizer.defaults
        if self.shape.cycle_momentum:
            found = f"beta2 is {self._BETA2} from now on" if self._cycles_momentum else "no, the optimizer has no betas"
            _log.warning("OneCycle cycles momentum: %s (scheduler.params.cycle_momentum)", found)
        super().__init__(optimizer, self.shape.last_batch_iteration)

    def get_lr(self) -> list[float]:
        shape, iteration = self.shape, self.last_batch_iteration
        if iteration < 0:
            return list(self._min_lrs)
        if iteration < shape.total_size:
            height = shape.height(iteration)
            return [low + (high - low) * height for low, high in zip(self._min_lrs, self._max_lrs, strict=True)]
        decay = 1 + shape.decay_lr_rate * shape.decay_intervals(iteration)
        return [low / decay for low in self._min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Compute the betas of each group at `last_batch_iteration`; None if momentum does not change."""
        if not self._cycles_momentum:
            return None
        shape, iteration = self.shape, self.last_batch_iteration
        if iteration < 0:
            momentums = self._min_moms
        elif iteration < shape.total_size:
            height, ends = shape.height(iteration), zip(self._min_moms, self._max_moms, strict=True)
            momentums = [high - (high - low) * height for low, high in ends]
        else:
            growth = 1 + shape.decay_mom_rate * shape.decay_intervals(iteration)
            momentums = [high * growth for high in self._max_moms]
        return [(momentum, self._BETA2) for momentum in momentums]

    def _apply(self) -> None:
        super()._apply()
        momentums = self.get_mom()
        if momentums is not None:
            for group, betas in zip(self.optimizer.param_groups, momentums, strict=True):
                group["betas"] = betas


class _Warmup:
    """Compute gamma(i) = log(i + 1) / log(n), or i / n, for i < n; n is at least 2. None: the default."""

    def __init__(self, num_steps: int | None, kind: str | None) -> None:
        num_steps, kind = 1000 if num_steps is None else num_steps, "log" if kind is None else kind
        if num_steps == 0:
            raise ConfigError(
                "scheduler.params.warmup_num_steps: expected at least 1 step, as in DeepSpeed since 0.19.6; found 0. "
                "Write 1 for the shortest warm-up, which older versions made of 0."
            )
        self.num_steps = max(2, int(_positive("warmup_num_steps", num_steps)))
        if kind not in ("log", "linear"):
            raise ConfigError(f"scheduler.params.warmup_type: expected log or linear; found {kind!r}.")
        self._linear = kind == "linear"

    def gamma(self, iteration: int) -> float:
        return iteration / self.num_steps if self._linear else math.log(iteration + 1) / math.log(self.num_steps)


def _each_group(optimizer: Optimizer, name: str, value: float | Sequence[float]) -> list[float]:
    """Return one value a group, from one for all or from a list. Raises ConfigError for anything else."""
    count = len(optimizer.param_groups)
    if not isinstance(value, (int, float, Sequence)) or isinstance(value, str):
        raise ConfigError(f"scheduler.params.{name}: expected a number or a list; found {value!r}.")
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if not all(isinstance(item, (int, float)) for item in values):
        raise ConfigError(f"scheduler.params.{name}: expected a list of numbers; found {value!r}.")
    if len(values) != count:
        raise ConfigError(
            f"scheduler.params.{name}: expected one value or {count}, one a param group; found {len(values)}."
        )
    return [float(item) for item in values]


def _positive(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"scheduler.params.{name}: expected at least 1 step; found {value!r}.")
    return value


_TRIED_STEPS = 3
_OWN: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(section: SchedulerSection, optimizer: Optimizer) -> Schedule | LRScheduler:
    """Build the schedule that a config names. Raises ConfigError for an unknown type, or arguments that it refuses."""
    kind = _OWN.get(section.type) or _torch_types().get(section.type)
    if kind is None:
        known = [*_OWN, *_torch_types()]
        close = difflib.get_close_matches(section.type, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"scheduler.type: expected one of {', '.join(_OWN)}, or a class of torch.optim.lr_scheduler; "
            f"found {section.type!r}. Did you mean {close}?"
        )
    try:
        if section.type not in _OWN:
            _try_steps(kind, optimizer, section.params)
        return kind(optimizer, **section.params)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"scheduler.params: expected arguments that {section.type} takes; {error}.") from error


def _try_steps(kind: Callable[..., Any], optimizer: Optimizer, params: Mapping[str, Any]) -> None:
    """Step a schedule of torch's over other groups: most of its classes look at their arguments in `step()` alone."""
    groups = [{**copied_group(group), "params": [torch.zeros(1)]} for group in optimizer.param_groups]
    example = Optimizer(groups, dict(optimizer.defaults))
    example._opt_called = True  # type: ignore[attr-defined]  # by which schedulers check the order of steps
    schedule = kind(example, **params)
    for _ in range(_TRIED_STEPS):
        with suppress(ValueError):  # past the last step, as of OneCycleLR
            schedule.step()


def _torch_types() -> dict[str, type[LRScheduler]]:
    """List torch's schedulers that `step()` drives without a metric."""
    return {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, LRScheduler)
        if name not in ("LRScheduler", "_LRScheduler", "ReduceLROnPlateau")
    }
