"""DeepSpeed's Adagrad: torch's, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DeepSpeedCPUAdagrad"]


def DeepSpeedCPUAdagrad(
    model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, **options: Any
) -> torch.optim.Adagrad:
    """Make torch's Adagrad. `options`: further ones of torch's."""
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay, **options)
