"""Provide DeepSpeed's five learning rate schedules, and build them, or any class of torch.optim.lr_scheduler, from the
config.

A DeepSpeed schedule computes the rate from a number i, `last_batch_iteration`. By default the constructor sets i = -1
and the first rate. Each `step()` adds 1 to i and sets the next rate. Formulas: deepspeed/runtime/lr_schedules.py of
DeepSpeed 0.19.
"""

from __future__ import annotations

import difflib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tiered_zero.config.schema import SCHEDULES, SchedulerSection
from tiered_zero.errors import ConfigError

_log = logging.getLogger(__name__)


class Schedule(ABC):
    """A learning rate schedule with the interface of torch's LRScheduler. It changes only `param_groups`."""

    def __init__(self, optimizer: Optimizer, **params: Any) -> None:
        """Check `params`, and set the first rate if `last_batch_iteration` is -1. The types and defaults of `params`
        come from the class of the same name in `config.schema`. Raises ValueError for unknown or invalid parameters,
        and ConfigError for a list whose length is not the number of param groups."""
        self.optimizer = optimizer
        self._own_lrs = self.get_last_lr()
        values = SCHEDULES[type(self).__name__].model_validate(params)
        self._params = {name: self._for_groups(name, value) for name, value in values}
        self.last_batch_iteration: int = self._params["last_batch_iteration"]
        if self.last_batch_iteration == -1:
            self._apply()

    def _for_groups(self, name: str, value: Any) -> Any:
        """Convert the value of the schedule's parameter `name`. A rate or momentum becomes a list with one value per
        param group; warmup_num_steps becomes at least 2. Raises ConfigError for a list of another length."""
        if name == "warmup_num_steps":
            return max(2, value)
        if not name.endswith(("_lr", "_mom")):
            return value
        count = len(self._own_lrs)
        values = self._own_lrs if value is None else value if isinstance(value, list) else [value] * count
        if len(values) != count:
            raise ConfigError(
                f"scheduler.params.{name}: expected one value or {count}, one a param group; found {len(values)}."
            )
        return [float(item) for item in values]

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the rate of each param group at `last_batch_iteration`."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rate for the next optimizer step. Call it once after each optimizer step. `last_batch_iteration`: the
        new value of this attribute; None: the old value plus 1."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Return the present rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in DeepSpeed's format."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict()` returned, and set the rates for it."""
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
    """Increases the rate without end, to find the largest useful rate: lr = min_lr * (1 + step_rate * t), with t =
    (`last_batch_iteration` + 1) / step_size, rounded down if `lr_range_test_staircase` is true."""

    def get_lr(self) -> list[float]:
        params = self._params
        interval = (self.last_batch_iteration + 1) / params["lr_range_test_step_size"]
        interval = math.floor(interval) if params["lr_range_test_staircase"] else interval
        increase = 1 + params["lr_range_test_step_rate"] * interval
        return [lr * increase for lr in params["lr_range_test_min_lr"]]


class WarmupLR(Schedule):
    """Increases the rate from `warmup_min_lr` to `warmup_max_lr` (default: each group's own rate), then keeps it. lr =
    min + (max - min) * gamma, where gamma is the completed fraction of the warmup."""

    def get_lr(self) -> list[float]:
        gamma = self._gamma(self.last_batch_iteration)
        ends = zip(self._params["warmup_min_lr"], self._params["warmup_max_lr"], strict=True)
        return [low + (high - low) * gamma for low, high in ends]

    def _gamma(self, iteration: int) -> float:
        return _warmup(self._params, iteration)


@final
class WarmupDecayLR(WarmupLR):
    """Increases the rate from `warmup_min_lr` to `warmup_max_lr`, then lowers it linearly, back to `warmup_min_lr` at
    step `total_num_steps`."""

    def _gamma(self, iteration: int) -> float:
        num_warmup, num_total = self._params["warmup_num_steps"], self._params["total_num_steps"]
        if iteration < num_warmup:
            return super()._gamma(iteration)
        return float(max(0.0, (num_total - iteration) / max(1, num_total - num_warmup)))


@final
class WarmupCosineLR(Schedule):
    """Multiplies the groups' own rates by a ratio. The ratio rises from `warmup_min_ratio` to 1, then falls along half
    a cosine to `cos_min_ratio`. In the first optimizer step the rate is 0, as in DeepSpeed."""

    def get_lr(self) -> list[float]:
        return [lr * self._ratio(self.last_batch_iteration) for lr in self._own_lrs]

    def _ratio(self, iteration: int) -> float:
        num_warmup, num_total = self._params["warmup_num_steps"], self._params["total_num_steps"]
        if iteration < 0:
            return 0.0
        if iteration < num_warmup:
            low: float = self._params["warmup_min_ratio"]
            return low + (1 - low) * _warmup(self._params, iteration)
        low = self._params["cos_min_ratio"]
        progress = min(1.0, (iteration - num_warmup + 1) / max(1, num_total - num_warmup))
        return max(0.0, low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


@final
class OneCycle(Schedule):
    """Increases the rate from min to max and lowers it again. With `cycle_momentum`, the momentum betas[0] decreases
    while the rate increases, and the reverse; betas[1] becomes 0.99, as in DeepSpeed. After the cycle, if
    `decay_step_size` is not 0, the rate decays and the momentum grows."""

    _BETA2 = 0.99

    def __init__(self, optimizer: Optimizer, **params: Any) -> None:
        super().__init__(optimizer, **params)
        if self._params["cycle_momentum"]:
            has_betas = "betas" in optimizer.defaults
            found = f"beta2 is {self._BETA2} from now on" if has_betas else "no, the optimizer has no betas"
            _log.warning("OneCycle cycles momentum: %s (scheduler.params.cycle_momentum)", found)

    def get_lr(self) -> list[float]:
        height, num_decays = self._position()
        decay = 1 + self._params["decay_lr_rate"] * num_decays
        ends = zip(self._params["cycle_min_lr"], self._params["cycle_max_lr"], strict=True)
        return [(low + (high - low) * height) / decay for low, high in ends]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group at `last_batch_iteration`; None if momentum does not change."""
        if not self._params["cycle_momentum"] or "betas" not in self.optimizer.defaults:
            return None
        if self.last_batch_iteration < 0:
            return [(low, self._BETA2) for low in self._params["cycle_min_mom"]]
        height, num_decays = self._position()
        growth = 1 + self._params["decay_mom_rate"] * num_decays
        ends = zip(self._params["cycle_min_mom"], self._params["cycle_max_mom"], strict=True)
        return [((high - (high - low) * height) * growth, self._BETA2) for low, high in ends]

    def _position(self) -> tuple[float, float]:
        """Return the rate's position between min (0) and max (1), and the number of decay periods after the cycle."""
        params, position = self._params, self.last_batch_iteration + 1
        size, second_size = params["cycle_first_step_size"], params["cycle_second_step_size"]
        total_size = size + (size if second_size is None else second_size)
        if position > total_size:
            return 0.0, (position - total_size) / params["decay_step_size"] if params["decay_step_size"] else 0.0
        position, stairs = position % total_size, params["cycle_first_stair_count"]
        if position > size:
            position, size = total_size - position, total_size - size
            second_stairs = params["cycle_second_stair_count"]
            stairs = stairs if second_stairs is None else second_stairs
        return (math.floor(position * stairs / size) / stairs if stairs > 0 else position / size), 0.0

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


def _warmup(params: Mapping[str, Any], iteration: int) -> float:
    """Return the completed fraction of a warmup of n steps at `iteration` i: log(i + 1) / log(n), or i / n if
    `warmup_type` is linear. The fraction is 0 if i < 0, and 1 if i >= n."""
    num_steps = params["warmup_num_steps"]
    if not 0 <= iteration < num_steps:
        return float(iteration >= 0)
    is_linear = params["warmup_type"] == "linear"
    return iteration / num_steps if is_linear else (1 / math.log(num_steps)) * math.log(iteration + 1)


_OWN: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(section: SchedulerSection, optimizer: Optimizer) -> Schedule | LRScheduler:
    """Build the schedule that a config names. Raises ConfigError for an unknown type or invalid arguments."""
    kind = _OWN.get(section.type) or _torch_types().get(section.type)
    if kind is None:
        known = [*_OWN, *_torch_types()]
        close = difflib.get_close_matches(section.type, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"scheduler.type: expected one of {', '.join(_OWN)}, or a class of torch.optim.lr_scheduler; "
            f"found {section.type!r}. Did you mean {close}?"
        )
    try:
        return kind(optimizer, **section.params)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"scheduler.params: expected arguments that {section.type} takes; {error}.") from error


def _torch_types() -> dict[str, type[LRScheduler]]:
    """Return name -> class of torch's schedulers, without ReduceLROnPlateau, whose `step()` needs a metric."""
    return {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, LRScheduler)
        if name not in ("LRScheduler", "_LRScheduler", "ReduceLROnPlateau")
    }
