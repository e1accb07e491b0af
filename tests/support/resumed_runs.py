"""Runs of one case of test_resume: never stopped, saved, and resumed; and everything that they end with."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import torch

import tiered_zero
from tests.support.inspection import everything, masters
from tests.support.models import ParityGPT, batch
from tests.support.pairwise import Case
from tests.support.trainers import tiered

NUM_STEPS = 2
"""Before the save, and after it."""


def build(seed: int, frozen: bool = False) -> ParityGPT:
    torch.manual_seed(seed)
    random.seed(seed)
    model = ParityGPT(num_blocks=1)
    for block in model.blocks:
        assert isinstance(block.dropout, torch.nn.Dropout)
        block.dropout.p = 0.2
    for param in model.blocks[0].parameters() if frozen else ():
        param.requires_grad_(False)
    return model


def two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}], lr=3e-3)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def engine_of(case: Case, swap_path: Path, seed: int = 0) -> tiered_zero.Engine:
    form = case["form"]
    dtype = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}}}.get(
        form, {"bf16": {"enabled": True}}
    )
    runtime: dict[str, Any] = {"update": case["update"], "delay_start_step": 1}
    if form.startswith(("lossy", "bf16_")):
        runtime["state_format"] = form
    return tiered(
        build(seed, case["frozen"]),
        swap_path,
        (case["params"], case["state"]),
        two_groups,
        case["accumulation"],
        0.5 if case["clipped"] else 0.0,
        schedule,
        runtime=runtime,
        **dtype,
    )


def train(engine: tiered_zero.Engine, case: Case, first: int, stop: int) -> None:
    """Steps `first` to `stop`; an overflow in step 1 halves the loss scale, and groups change after it."""
    for number in range(first, stop):
        for micro in range(case["accumulation"]):
            loss = engine(*batch(number * case["accumulation"] + micro), number % 3 == 1)
            overflows = case["form"] == "fp16" and number == 1
            engine.backward(loss * float("inf") if overflows else loss * random.uniform(0.5, 2.0))
            engine.step()
        if case["changed_groups"] and number == 1:
            engine.optimizer.param_groups[1].update(weight_decay=0.3, betas=(0.8, 0.95))


def seen(engine: tiered_zero.Engine) -> dict[str, Any]:
    groups = [{**group, "params": len(group["params"])} for group in engine.optimizer.param_groups]
    return {
        **everything(engine),
        **{f"masters {name}": value for name, value in masters(engine).items()},
        "groups": groups,
        "counts": (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.was_step_applied()),
        "loss scale": engine.loss_scale,
        "norm": engine.get_global_grad_norm(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }


def undisturbed(case: Case, swap_path: Path) -> dict[str, Any]:
    """A run that is never saved. A save makes a delayed update visible, so this one does too."""
    with engine_of(case, swap_path) as engine:
        train(engine, case, 0, NUM_STEPS)
        if case["update"] == "delayed":
            engine.flush()
        train(engine, case, NUM_STEPS, 2 * NUM_STEPS)
        return seen(engine)


def resumed(case: Case, swap_path: Path, path: Path) -> dict[str, Any]:
    with engine_of(case, swap_path, seed=1) as engine:
        assert engine.load_checkpoint(path) == (str(path / f"global_step{NUM_STEPS}"), {"epoch": 3})
        train(engine, case, NUM_STEPS, 2 * NUM_STEPS)
        return seen(engine)


def digests(found: dict[str, Any]) -> dict[str, str]:
    """Name -> a hash of the bytes of tensors, and of the text of everything else."""
    return {
        name: hashlib.sha256(
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            if isinstance(value, torch.Tensor)
            else repr(value).encode()
        ).hexdigest()
        for name, value in found.items()
    }
