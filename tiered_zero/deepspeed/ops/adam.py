"""DeepSpeed's Adams: torch's, with DeepSpeed's defaults and the options of its constructors."""

from __future__ import annotations

from typing import Any

import torch

from tiered_zero.errors import ConfigError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


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
    """Make torch's AdamW, or its Adam without `adamw_mode`. State has the format that the config says. Raises
    ConfigError without `bias_correction`, which only the config can ask for."""
    if not bias_correction:
        raise ConfigError(
            "bias_correction: expected true, as torch's Adam has no other; found false. Name the optimizer in the "
            "config, with bias_correction in optimizer.params."
        )
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


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
    """The same as `DeepSpeedCPUAdam`: on a GPU the engine takes torch's code."""
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
