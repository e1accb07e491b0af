"""A learning rate schedule of every class that torch and the package have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from tiered_zero.rules.lr import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


class Doubling:
    """A callable with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 + 0.01 * self.calls


def sequence(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
        lr_scheduler.ExponentialLR(optimizer, 0.7),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [3, 6])


def chained(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.3, 4), lr_scheduler.StepLR(optimizer, 2, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def of_transformers(name: str, optimizer: Optimizer) -> Any:
    """Its import takes seconds of the processor, in each process that collects tests."""
    import transformers

    return getattr(transformers, name)(optimizer, 2, 9)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, Doubling()]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9 + e / 100),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4, 4, 6], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": sequence,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 1e-4),
    "ChainedScheduler": chained,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3, scale_fn=lambda x: 0.9**x),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=12, three_phase=True),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
    "transformers' cosine": partial(of_transformers, "get_cosine_schedule_with_warmup"),
    "transformers' linear": partial(of_transformers, "get_linear_schedule_with_warmup"),
    "LRRangeTest": lambda o: LRRangeTest(o, lr_range_test_min_lr=0.01, lr_range_test_step_size=2),
    "OneCycle": lambda o: OneCycle(
        o, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=3, decay_step_size=1, decay_lr_rate=0.1
    ),
    "WarmupLR": lambda o: WarmupLR(o, warmup_num_steps=5),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, total_num_steps=9, warmup_num_steps=3),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, total_num_steps=9, warmup_num_steps=3),
}
