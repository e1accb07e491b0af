"""Lion as a plain torch optimizer: torch.optim has none, DeepSpeed's JSON names one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """EvoLved Sign Momentum (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", program 1).

    c = b1 * m + (1 - b1) * g;  p = p * (1 - lr * weight_decay) - lr * sign(c);  m = b2 * m + (1 - b2) * g.
    Elementwise; one state array, `exp_avg`. The defaults are those of DeepSpeed's Lion.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not float(lr) >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}; two numbers in [0, 1) are needed")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr = float(group["lr"])
            beta1, beta2 = cast("tuple[float, float]", group["betas"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = -parameter.grad if group["maximize"] else parameter.grad
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                exp_avg = state["exp_avg"]
                direction = exp_avg.lerp(grad, 1.0 - beta1).sign_()
                parameter.mul_(1.0 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                exp_avg.lerp_(grad, 1.0 - beta2)
        return loss
