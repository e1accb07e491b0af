"""torch's AdamW with the square root that the native kernel takes for 16-bit gradients."""

from __future__ import annotations

from typing import Any

import torch


class ExactRoot(torch.optim.Optimizer):
    """torch.optim.AdamW's for-loop form, operation by operation, with the exact square root."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                square = state.setdefault("square", torch.zeros_like(param))
                state["step"] = step = state.get("step", 0) + 1
                param.mul_(1 - group["lr"] * group["weight_decay"])
                mean.lerp_(param.grad, 1 - 0.9)
                square.mul_(0.999).addcmul_(param.grad, param.grad, value=1 - 0.999)
                root = square.double().sqrt().float() / (1 - 0.999**step) ** 0.5
                param.addcdiv_(mean, root.add_(1e-8), value=-group["lr"] / (1 - 0.9**step))
