"""Courses of training on the lagging device, beside plain PyTorch on the CPU. Called in the child."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.models import ParityGPT, batch
from tests.support.trainers import Plain, Record, adamw, follow, same_bits, tiered, train

NUM_STEPS = 3
PREFETCH = (None, 0, 3000)


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a model is trained; what of it a difference of bits may not depend on has its defaults."""

    placement: tuple[str, str]
    policy: str = "overlapped"
    precision: str = "fp32"
    accumulation: int = 1
    clipping: float = 0.0
    prefetch: int | None = None


def courses(placement: tuple[str, str], precision: str, half: int) -> list[Course]:
    """Policies, clipping, accumulation: half of all, of which each two values meet; `half`: 0 or 1, the other four."""
    axes = itertools.product(("overlapped", "barrier"), (0.0, 0.5), (1, 2))
    return [
        Course(
            placement=placement,
            policy=policy,
            precision=precision,
            accumulation=accumulation,
            clipping=clipping,
            prefetch=PREFETCH[number % 3],
        )
        for number, (policy, clipping, accumulation) in enumerate(axes)
        if number.bit_count() % 2 == half
    ]


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT(num_blocks=1)


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 2 == 1)


def data_on_device(number: int) -> tuple[Any, ...]:
    tokens, targets, detour = data(number)
    return tokens.cuda(), targets.cuda(), detour


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


OPTIMIZERS = {"fp32": adamw, "bf16": momentum}
"""AdamW's square root is not the same with 16-bit gradients (see tests/parity/test_half.py)."""


@functools.cache
def plain(precision: str, accumulation: int, clipping: float) -> Record:
    """Plain PyTorch on the CPU, whose attention is made of the operators that the device has."""
    dtype = torch.bfloat16 if precision == "bf16" else None
    trainer = Plain(build(), OPTIMIZERS[precision], accumulation, clipping, dtype=dtype)
    with sdpa_kernel(SDPBackend.MATH):
        return follow(lambda own: train(own, data, NUM_STEPS, accumulation), trainer)


def reference(course: Course, swap_path: Path) -> Record:
    """What plain PyTorch sees and leaves; of delayed updates, which it does not have, what the CPU does."""
    if course.policy != "delayed":
        return plain(course.precision, course.accumulation, course.clipping)
    with sdpa_kernel(SDPBackend.MATH):
        engine = engine_for(course, swap_path, device="cpu")
        return follow(lambda own: train(own, data, NUM_STEPS, course.accumulation), engine)


def engine_for(course: Course, swap_path: Path, **runtime: Any) -> Any:
    """An engine on the lagging device, unless `runtime` names another."""
    return tiered(
        build(),
        swap_path,
        course.placement,
        OPTIMIZERS[course.precision],
        course.accumulation,
        course.clipping,
        zero={"stage3_prefetch_bucket_size": course.prefetch},
        runtime={"device": "cuda", "update": course.policy, "delay_start_step": 1, "debug_poison": True, **runtime},
        bf16={"enabled": course.precision == "bf16"},
    )


def differences(expected: Record, found: Record) -> list[str]:
    """Which observations and weights have other bits."""
    seen = [str(i) for i, pair in enumerate(zip(expected.seen, found.seen, strict=True)) if not same_bits(*pair)]
    return seen + [name for name, value in expected.weights.items() if not same_bits(value, found.weights[name])]


def differences_of(course: Course, swap_path: Path) -> list[str]:
    """Train on the device; return what differs from plain PyTorch."""
    engine = engine_for(course, swap_path)
    found = follow(lambda own: train(own, data_on_device, NUM_STEPS, course.accumulation), engine)
    return differences(reference(course, swap_path), found)
