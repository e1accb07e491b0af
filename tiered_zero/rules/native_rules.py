"""Define Adam, SGD, Adagrad and Lion on the native kernel, and Lion as a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, final

import torch
from torch.optim import Optimizer

from tiered_zero.native.update import Hyper, Rule, UpdateKernel
from tiered_zero.rules.kernel_rule import NativeRule, flags_of
from tiered_zero.rules.torch_rule import ELEMENTWISE

BIAS_CORRECTION = "bias_correction"


@final
class AdamRule(NativeRule):
    """Adam (Kingma and Ba, 2015; weight decay in the gradient) or AdamW (Loshchilov and Hutter, 2019; decoupled).

    Param groups have torch's keys; lr and betas may be 0-d tensors. As in torch, the group's decoupled_weight_decay
    decides which of the two is used; `decoupled` is its default. The state arrays are exp_avg, exp_avg_sq and, with
    amsgrad, max_exp_avg_sq; the scalar is step. If DeepSpeed's key bias_correction is false, all powers of the betas
    are taken as 0, as after infinitely many steps.
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
        self._class = torch.optim.AdamW if decoupled else torch.optim.Adam
        super().__init__(kernel, state_dtype)

    @staticmethod
    def seed_of(step: float) -> int:
        """Return the seed for stochastic rounding of a step's first array; further arrays use the following numbers."""
        return int(step) * 0x9E3779B1 & 0xFFFFFFFF

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        # if these are 0-d tensors instead of numbers, torch computes in fp32, and so does this
        lr, (beta1, beta2), weight_decay = hyper["lr"], hyper["betas"], hyper["weight_decay"]
        number, decoupled = self._phase(scalars) + 1, hyper["decoupled_weight_decay"]
        step = number if hyper.get(BIAS_CORRECTION, True) else math.inf
        return Hyper(
            rule=Rule.ADAM,
            flags=flags_of(MAXIMIZE=hyper["maximize"], AMSGRAD=hyper["amsgrad"], L2=weight_decay and not decoupled),
            seed=self.seed_of(number),
            l2=weight_decay,
            decay=float(1 - lr * weight_decay) if decoupled else 1.0,
            weight1=float(1 - beta1),
            beta2=float(beta2),
            weight2=float(1 - beta2),
            root2=float((1 - beta2**step) ** 0.5),
            eps=float(hyper["eps"]),
            rate=float(-(lr / (1 - beta1**step))),
        )

    def _reference_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        corrected = hyper.get(BIAS_CORRECTION, True)
        return self._torch_scalars(scalars) if corrected else {"step": torch.tensor(math.inf)}


@final
class SgdRule(NativeRule):
    """torch.optim.SGD with momentum, dampening and nesterov. The state array is momentum_buffer, which the first step
    fills."""

    _class = torch.optim.SGD
    _counts_steps = False
    _variants = (
        {"momentum": 0.0, "weight_decay": 0.1, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": False, "maximize": True},
        {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True},
    )

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if hyper["momentum"] else ()

    def _next_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        has_buffer = hyper["momentum"] or self._phase(scalars)
        return super()._next_scalars(hyper, scalars) if has_buffer else {"momentum_buffer": "absent"}

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        flags = {name.upper(): hyper[name] for name in ("maximize", "momentum", "nesterov")}
        return Hyper(
            rule=Rule.SGD,
            flags=flags_of(**flags, L2=hyper["weight_decay"], FIRST=not self._phase(scalars)),
            l2=hyper["weight_decay"],
            beta2=hyper["momentum"],
            weight2=1 - hyper["dampening"],
            rate=float(-hyper["lr"]),
        )


@final
class AdagradRule(NativeRule):
    """torch.optim.Adagrad. The state array is sum, the scalar step."""

    _class = torch.optim.Adagrad
    _takes_root = True
    _variants = ({"weight_decay": 0.1, "maximize": True, "lr_decay": 0.1, "eps": 1e-3},)

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def init_state(self, state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]) -> None:
        state["sum"].fill_(self._completed(hyper)["initial_accumulator_value"])

    def first_state(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> dict[str, Any]:
        state = super().first_state(shape, hyper)
        state["sum"].fill_(self._completed(hyper)["initial_accumulator_value"])
        return state

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        return Hyper(
            rule=Rule.ADAGRAD,
            flags=flags_of(MAXIMIZE=hyper["maximize"], L2=hyper["weight_decay"]),
            l2=hyper["weight_decay"],
            decay=1.0,
            root2=1.0,
            eps=hyper["eps"],
            rate=float(-hyper["lr"] / (1 + self._phase(scalars) * hyper["lr_decay"])),
        )


class Lion(Optimizer):
    """Lion as a plain torch optimizer. torch.optim has no Lion, and DeepSpeed's JSON can ask for it.

    EvoLved Sign Momentum (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", program 1). c = b1 * m +
    (1 - b1) * g; p = p * (1 - lr * weight_decay) - lr * sign(c); m = b2 * m + (1 - b2) * g. Elementwise; one state
    array, `exp_avg`. The defaults are those of DeepSpeed's Lion.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Return the closure's loss, if there is a closure."""
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


ELEMENTWISE.add(Lion)


@final
class LionRule(NativeRule):
    """The rule of `Lion`. The state array is exp_avg."""

    _class = Lion
    _counts_steps = False
    _variants = (
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "betas": (0.3, 0.6)},  # lerp with weights below and above one half
        {"betas": (0.6, 0.3)},
    )

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        lr = float(hyper["lr"])
        beta1, beta2 = (float(beta) for beta in hyper["betas"])
        return Hyper(
            rule=Rule.LION,
            flags=flags_of(MAXIMIZE=hyper["maximize"]),
            decay=1 - lr * hyper["weight_decay"],
            weight1=1 - beta1,
            weight2=1 - beta2,
            rate=-lr,
        )
