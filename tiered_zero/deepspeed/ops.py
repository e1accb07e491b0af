"""Provide DeepSpeed's optimizers: torch's classes and this package's Lion, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

import torch

from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.errors import ConfigError
from tiered_zero.rules.native_rules import Lion as FusedLion

__all__ = ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"]

__compatible_ops__ = {"async_io": True, "cpu_adagrad": True, "cpu_adam": True, "cpu_lion": True}
"""DeepSpeed's compiled operators that work here, without a compiler."""

__getattr__ = refuse_other_names("ops")

_KEYS = {"params", "param_names", "lr", "initial_lr", "betas", "eps", "weight_decay", "bias_correction"}
"""A param group that has `lr` but not `amsgrad` counts as one of Adam only if it has no other keys than these. Keys
whose value is a text are ignored."""


def DeepSpeedCPUAdam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Adam:
    """Make torch's AdamW, or torch's Adam if `adamw_mode` is false. `fp32_optimizer_states` has no effect. Raises
    ConfigError if `bias_correction` is false, or if a param group was made for an optimizer other than Adam."""
    if not bias_correction:
        raise ConfigError(
            "bias_correction: expected true, as torch's Adam has no other; found false. Name the optimizer in the "
            "config, with bias_correction in optimizer.params."
        )
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    params = list(model_params)
    _check_groups(params)
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Adam:
    """Make the same optimizer as `DeepSpeedCPUAdam`."""
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


def _check_groups(params: list[Any]) -> None:
    """Raise ConfigError if a param group was made for an optimizer other than Adam. Accelerate passes the groups of any
    optimizer to DeepSpeedCPUAdam."""
    for group in params:
        if not isinstance(group, dict) or "lr" not in group or "amsgrad" in group:
            continue  # of no optimizer, or of torch's Adam
        found = [key for key, value in group.items() if key not in _KEYS and not isinstance(value, str)]
        if not (group.get("eps", 1) and group.get("betas", (0, 1))[1]):  # Lion, SGD and RMSprop of bitsandbytes
            found.append("0 for eps or beta2")
        if found:
            raise ConfigError(
                f"DeepSpeedCPUAdam: expected param groups of Adam; found one with {', '.join(found)}, of another "
                'optimizer. Write "zero_force_ds_cpu_optimizer": false into the JSON, and Accelerate passes your '
                "optimizer on as it is; or choose AdamW."
            )


def DeepSpeedCPUAdagrad(
    model_params: Any,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adamw_mode: bool = False,
    **options: Any,
) -> torch.optim.Adagrad:
    """Make torch's Adagrad. `adamw_mode`: no effect. `options`: further arguments of torch's Adagrad."""
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay, **options)


def DeepSpeedCPULion(model_params: Any, *args: Any, adamw_mode: bool = False, **options: Any) -> FusedLion:
    """Make a Lion. `adamw_mode`: no effect; Accelerate passes it to every optimizer."""
    return FusedLion(model_params, *args, **options)
