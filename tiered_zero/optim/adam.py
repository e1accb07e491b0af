"""Adam and AdamW on the native kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from tiered_zero.native.update import Hyper, Rule, UpdateKernel
from tiered_zero.optim.kernel_rule import NativeRule, flags_of


@final
class AdamRule(NativeRule):
    """Adam (Kingma and Ba, 2015; weight decay in the gradient) or AdamW (Loshchilov and Hutter, 2019; decoupled).

    Hyper keys are torch's: lr, betas, eps, weight_decay, amsgrad, maximize; lr and betas may be 0-d tensors. As in
    torch, decoupled_weight_decay of the group decides; `decoupled` is its default. State: exp_avg, exp_avg_sq and,
    with amsgrad, max_exp_avg_sq; scalar: step.
    """

    unsigned_field = "exp_avg_sq"
    _takes_root = True
    _variants = (
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "amsgrad": True, "betas": (0.3, 0.6), "eps": 1e-3},  # the other branch of lerp
    )

    def __init__(
        self, *, decoupled: bool, kernel: UpdateKernel | None, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.decoupled = decoupled
        self._class = torch.optim.AdamW if decoupled else torch.optim.Adam
        super().__init__(kernel, state_dtype)

    def with_state(self, state_dtype: torch.dtype) -> AdamRule:
        """Make the same rule on the same kernel, with its moments in `state_dtype`."""
        return AdamRule(decoupled=self.decoupled, kernel=self.kernel, state_dtype=state_dtype)

    @staticmethod
    def seed_of(step: float) -> int:
        """Seed the stochastic rounding of a step's first array; the next arrays have the next numbers."""
        return int(step) * 0x9E3779B1 & 0xFFFFFFFF

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        # numbers, or 0-d tensors: then torch computes all this in fp32, and so do we
        lr, (beta1, beta2), weight_decay = hyper["lr"], hyper["betas"], hyper["weight_decay"]
        step, decoupled = self._phase(scalars) + 1, hyper["decoupled_weight_decay"]
        return Hyper(
            rule=Rule.ADAM,
            flags=flags_of(MAXIMIZE=hyper["maximize"], AMSGRAD=hyper["amsgrad"], L2=weight_decay and not decoupled),
            seed=self.seed_of(step),
            l2=weight_decay,
            decay=float(1 - lr * weight_decay) if decoupled else 1.0,
            weight1=float(1 - beta1),
            beta2=float(beta2),
            weight2=float(1 - beta2),
            root2=float((1 - beta2**step) ** 0.5),
            eps=float(hyper["eps"]),
            rate=float(-(lr / (1 - beta1**step))),
        )
