"""Provide DeepSpeed's `utils`: full masters, gradients and state of a parameter, and a loader without end.

`utils.zero_to_fp32` reads the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.deepspeed.utils import zero_to_fp32
from tiered_zero.deepspeed.utils.logging import log_dist, logger
from tiered_zero.engine.full_values import get_grad, get_master, get_state, set_grad, set_master, set_state
from tiered_zero.errors import ConfigError

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
    "zero_to_fp32",
]

__getattr__ = refuse_other_names("utils")


class RepeatingLoader:
    """Yields the batches of `loader`, and begins again when the loader ends."""

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


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Return the modules of `model` that are of these classes (or class names, with or without their module's name),
    and change nothing: what a module needs is fetched when it is called. Raises ConfigError if there is no such module
    and `raise_if_not_found` is true."""
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    names = {kind for kind in leaf_module_classes if isinstance(kind, str)}

    def is_meant(module: nn.Module) -> bool:
        own = type(module)
        return isinstance(module, kinds) or own.__name__ in names or f"{own.__module__}.{own.__qualname__}" in names

    found = [module for module in model.modules() if is_meant(module)]
    if not found and raise_if_not_found:
        asked = ", ".join(getattr(kind, "__name__", str(kind)) for kind in leaf_module_classes)
        raise ConfigError(
            f"Expected modules of {asked or 'some class'} in {type(model).__name__}; found none. Correct the names, or "
            "pass raise_if_not_found=False."
        )
    return found


safe_get_full_fp32_param, safe_set_full_fp32_param = get_master, set_master
safe_get_full_grad, safe_set_full_grad = get_grad, set_grad


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of the state called `optim_state_key`, such as "exp_avg", in fp32 on the CPU; None before the first
    step."""
    return get_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the state called `optim_state_key`, such as "exp_avg", to `value`. Raises ModelError before the first
    step."""
    set_state(param, optim_state_key, value)
