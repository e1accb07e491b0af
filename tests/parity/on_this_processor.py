"""Trains in plain torch and through the engine in this process, and steps each rule on each level of the kernel.

Run by test_processors.py under variables that change which code MKL and ATen take. Prints one JSON line: what torch
calls the code that it takes, and which rules' fp32 gradients the kernel serves.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.models import ParityGPT, batch
from tests.support.trainers import Plain, assert_same_bits, follow, tiered, train
from tiered_zero.native import find_library
from tiered_zero.native.update import UpdateKernel, supported_levels
from tiered_zero.rules.native_rules import (
    AdagradRule,
    AdamRule,
    Lion,
    LionRule,
    NativeRule,
    SgdRule,
    find_torch_root,
    open_kernel,
)
from tiered_zero.rules.rule import Slice

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.1, "maximize": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    "Lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.3)}),
}
RULES: dict[str, Callable[[UpdateKernel | None], NativeRule]] = {
    "AdamW": lambda kernel: AdamRule(decoupled=True, kernel=kernel),
    "Adam": lambda kernel: AdamRule(decoupled=False, kernel=kernel),
    "SGD": SgdRule,
    "Adagrad": AdagradRule,
    "Lion": LionRule,
}


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind, hyper = OPTIMIZERS[name]
    return kind([param for param in model.parameters() if param.requires_grad], **hyper)


def compare_training(name: str, swap_path: Path) -> None:
    """Three steps with clipping, so that norms count too."""
    make = functools.partial(make_optimizer, name)
    torch.manual_seed(0)
    expected = follow(lambda own: train(own, batch, 3), Plain(ParityGPT(), make, clipping=0.5))
    torch.manual_seed(0)
    engine = tiered(ParityGPT(), swap_path, ("cpu", "nvme"), make, clipping=0.5)
    assert_same_bits(expected, follow(lambda own: train(own, batch, 3), engine))


def compare_steps(name: str, kernel: UpdateKernel | None) -> bool:
    """Six steps on gradients of very different sizes; the length leaves a tail. Returns the rule's answer."""
    kind, hyper = OPTIMIZERS[name]
    rule, numel = RULES[name](kernel), 20_011
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(numel))
    optimizer = kind([param], **hyper)
    fields = rule.state_fields((numel,), hyper)
    run = Slice(
        master=param.detach().clone(),
        grad=torch.empty(0),
        state={f.name: torch.zeros(numel) for f in fields},
        scalars={},
        hyper=hyper,
    )
    rule.init_state(run.state, hyper)
    for step in range(6):
        param.grad = torch.randn(numel) * 10.0 ** (torch.rand(numel) * 6 - 3)
        run.grad = param.grad.clone()
        optimizer.step()
        rule.update([run])
        assert torch.equal(run.master, param.detach()), f"{name}, {kernel and kernel.level}, step {step}"
    return rule.torch_bits


def main() -> None:
    torch.set_num_threads(1)
    library, levels = find_library("_update"), []
    if library is not None:
        levels = supported_levels(library)
    kernels = [UpdateKernel(library, level, 1, find_torch_root()) for level in levels if library] or [open_kernel()]
    served = {name: all([compare_steps(name, kernel) for kernel in kernels]) for name in RULES}
    for name in OPTIMIZERS:
        compare_training(name, Path(sys.argv[1]))
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "served": served}))


if __name__ == "__main__":
    main()
