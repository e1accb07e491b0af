"""Provide DeepSpeed's Adagrad: torch's, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DeepSpeedCPUAdagrad"]


def DeepSpeedCPUAdagrad(
    model_params: Any,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adamw_mode: bool = False,
    **options: Any,
) -> torch.optim.Adagrad:
    """Make torch's Adagrad. `adamw_mode`: no effect; Accelerate passes it to every optimizer. `options`: further
    arguments of torch's Adagrad."""
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay, **options)
