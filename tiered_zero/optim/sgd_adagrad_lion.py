"""SGD, Adagrad and Lion on the native kernel: the rules that keep one array a parameter, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from tiered_zero.native.update import Flag, Hyper, Rule, UpdateKernel
from tiered_zero.optim.kernel_rule import NativeRule
from tiered_zero.optim.lion import Lion
from tiered_zero.optim.rule import Run
from tiered_zero.optim.torch_rule import TorchRule

_STARTED = {"initialized": True}
_WITHOUT_BUFFER = {"momentum_buffer": "absent"}


def _flags(hyper: Mapping[str, Any], decayed: bool) -> Flag:
    flags = Flag.MAXIMIZE if hyper["maximize"] else Flag(0)
    return flags | Flag.L2 if decayed and hyper["weight_decay"] else flags


@final
class SgdRule(NativeRule):
    """torch.optim.SGD: momentum, dampening, nesterov. State: momentum_buffer, which the first step fills."""

    _variants = (
        {"momentum": 0.0, "weight_decay": 0.1, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": False, "maximize": True},
        {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True},
    )

    def __init__(self, kernel: UpdateKernel | None, state_dtype: torch.dtype = torch.float32, **options: Any) -> None:
        reference = TorchRule(torch.optim.SGD, options)
        super().__init__(reference, torch.optim.SGD([torch.zeros(1)], **options).defaults, kernel, state_dtype)

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if hyper["momentum"] else ()

    def _phase(self, scalars: Mapping[str, Any]) -> float:
        return float("initialized" in scalars)

    def _next_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        return dict(_STARTED if hyper["momentum"] or "initialized" in scalars else _WITHOUT_BUFFER)

    def _torch_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        return dict(scalars)

    def _own_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        return dict(scalars)

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        flags = _flags(hyper, decayed=True)
        flags |= Flag.MOMENTUM if hyper["momentum"] else Flag(0)
        flags |= Flag.NESTEROV if hyper["nesterov"] else Flag(0)
        flags |= Flag(0) if self._phase(scalars) else Flag.FIRST
        return Hyper(
            rule=Rule.SGD,
            flags=flags,
            l2=hyper["weight_decay"],
            beta2=hyper["momentum"],
            weight2=1 - hyper["dampening"],
            rate=float(-hyper["lr"]),
        )


@final
class AdagradRule(NativeRule):
    """torch.optim.Adagrad. State: sum; scalar: step."""

    _takes_root = True
    _variants = ({"weight_decay": 0.1, "maximize": True, "lr_decay": 0.1, "eps": 1e-3},)

    def __init__(self, kernel: UpdateKernel | None, **options: Any) -> None:
        reference = TorchRule(torch.optim.Adagrad, options)
        super().__init__(reference, torch.optim.Adagrad([torch.zeros(1)], **options).defaults, kernel)

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def init_state(self, run: Run) -> None:
        run.state["sum"].fill_({**self._defaults, **run.hyper}["initial_accumulator_value"])

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        return Hyper(
            rule=Rule.ADAGRAD,
            flags=_flags(hyper, decayed=True),
            l2=hyper["weight_decay"],
            decay=1.0,
            root2=1.0,
            eps=hyper["eps"],
            rate=float(-hyper["lr"] / (1 + self._phase(scalars) * hyper["lr_decay"])),
        )


@final
class LionRule(NativeRule):
    """Lion as in lion.py. State: exp_avg."""

    _variants = (
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "betas": (0.3, 0.6)},  # lerp with weights on both sides of a half
        {"betas": (0.6, 0.3)},
    )

    def __init__(self, kernel: UpdateKernel | None, **options: Any) -> None:
        super().__init__(TorchRule(Lion, options), Lion([torch.zeros(1)], **options).defaults, kernel)

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _phase(self, scalars: Mapping[str, Any]) -> float:
        return 0.0

    def _next_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        return dict(_STARTED)

    def _torch_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        return dict(scalars)

    def _own_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        return dict(scalars)

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        lr = float(hyper["lr"])
        beta1, beta2 = (float(beta) for beta in hyper["betas"])
        return Hyper(
            rule=Rule.LION,
            flags=_flags(hyper, decayed=False),
            decay=1 - lr * hyper["weight_decay"],
            weight1=1 - beta1,
            weight2=1 - beta2,
            rate=-lr,
        )
