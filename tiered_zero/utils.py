"""DeepSpeed's `utils` namespace: full masters, gradients and state of a parameter, and a loader without end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tiered_zero.full_values import get_grad, get_master, get_state, set_grad, set_master, set_state

logger = logging.getLogger("tiered_zero")

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
]


class RepeatingLoader:
    """Begins again where `loader` ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` unless `ranks` leaves this rank, 0, out."""
    if ranks is None or 0 in ranks or -1 in ranks:
        logger.log(level, "%s", message)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """The modules of these classes. Nothing else is to do: what a module needs is fetched as it is called."""
    names = {kind if isinstance(kind, str) else kind.__name__ for kind in leaf_module_classes}
    return [module for module in model.modules() if type(module).__name__ in names]


safe_get_full_fp32_param, safe_set_full_fp32_param = get_master, set_master
safe_get_full_grad, safe_set_full_grad = get_grad, set_grad


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """State such as "exp_avg", fp32, a copy on the CPU; None before the first step."""
    return get_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set state such as "exp_avg". Raises ModelError before the first step."""
    set_state(param, optim_state_key, value)
