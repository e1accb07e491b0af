"""fp16 steps whose gradients overflow: nothing moves, everything is counted, the scale follows DeepSpeed's rule."""

from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.inspection import differences, everything
from tests.support.models import ParityGPT, batch, groups
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, tiered, train

BAD_STEPS = {2, 3, 6}
"""Counted from 0."""


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=0.05, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def fp16(**options: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 2, "loss_scale_window": 2, **options}}


def take_step(engine: tiered_zero.Engine, number: int, bad: bool = False) -> None:
    loss = engine(*batch(number))
    engine.backward(loss * float("inf") if bad else loss)
    engine.step()


@pytest.mark.parametrize("placement", [("none", "none"), *FAR], ids="-".join)
def test_a_skipped_step_leaves_every_bit(placement, swap_path, caplog):
    with tiered(build(), swap_path, placement, adamw, make_scheduler=halving, **fp16()) as engine:
        for number in range(3):
            take_step(engine, number)
        before = everything(engine)
        caplog.clear()
        take_step(engine, 3, bad=True)
        assert not differences(before, everything(engine))
        assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (4, 1, False)
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1 and "skipped" in warnings[0].message and "not finite" in warnings[0].message
        take_step(engine, 4)
        assert engine.was_step_applied() and engine.skipped_steps == 1
        after = everything(engine)
        assert after["lr"] != before["lr"] and after["scheduler"] == before["scheduler"] + 1
        assert not torch.equal(after["tokens.weight"], before["tokens.weight"])


def test_one_bad_micro_batch_skips_the_whole_step(swap_path):
    with tiered(build(), swap_path, make_optimizer=adamw, accumulation=3, make_scheduler=halving, **fp16()) as engine:
        before = everything(engine)
        for number in range(3):
            take_step(engine, number, bad=number == 1)
        assert engine.skipped_steps == 1
        assert not differences(before, everything(engine))


@pytest.mark.parametrize("placement", [("none", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_training_around_overflows_is_training_without_those_steps(placement, swap_path):
    """Dynamic scale: bitwise the plain loop that leaves out the bad steps and has the scale of the moment."""
    scales = [1024.0] * 4 + [512.0] * 3 + [256.0] * 3 + [512.0]
    """Before each step, by DeepSpeed: the overflow in step 2 uses a credit, those in 3 and 6 halve; then it grows with
    the third good step (the window of 2, and the one that follows the overflow)."""

    def with_overflows(engine: tiered_zero.Engine) -> list[Any]:
        seen: list[Any] = []
        for number in range(len(scales)):
            seen.append(engine.loss_scale)
            take_step(engine, number, number in BAD_STEPS)
        return seen

    def without(plain: Plain) -> list[Any]:
        for number, scale in enumerate(scales):
            plain.loss_scale = scale
            if number not in BAD_STEPS:
                plain.backward(plain(*batch(number)))
                plain.step()
        return list(scales)

    expected = follow(without, Plain(build(), momentum, clipping=0.5, make_scheduler=halving, dtype=torch.float16))
    engine = tiered(build(), swap_path, placement, momentum, clipping=0.5, make_scheduler=halving, **fp16())
    assert_same_bits(expected, follow(with_overflows, engine))


def test_bf16_skips_as_well_unless_switched_off(swap_path):
    with tiered(build(), swap_path, ("cpu", "cpu"), adamw, make_scheduler=halving, bf16={"enabled": True}) as engine:
        before = everything(engine)
        take_step(engine, 0, bad=True)
        assert engine.skipped_steps == 1
        assert not differences(before, everything(engine))
    unchecked = {"enabled": True, "check_grad_overflow": False}
    with tiered(build(), swap_path, ("cpu", "cpu"), adamw, bf16=unchecked) as engine:
        take_step(engine, 0, bad=True)
        assert engine.skipped_steps == 0
        assert not all(torch.isfinite(p).all() for p in engine.module.state_dict().values() if p.is_floating_point())


def test_an_overflow_at_the_smallest_scale_is_an_error_that_changes_nothing(swap_path):
    floor = fp16(initial_scale_power=1, min_loss_scale=2, hysteresis=1)
    with tiered(build(), swap_path, ("cpu", "cpu"), adamw, make_scheduler=halving, **floor) as engine:
        before = everything(engine)
        with pytest.raises(tiered_zero.errors.NonFiniteError, match="min_loss_scale"):
            take_step(engine, 0, bad=True)
        assert not differences(before, everything(engine))
        train(engine, batch, 1)  # nothing is latched: a finite step can follow
