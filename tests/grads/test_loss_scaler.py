"""The dynamic loss scale, against a direct transcription of DeepSpeed's rule and by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.config.load import load
from tiered_zero.errors import ConfigError, NonFiniteError
from tiered_zero.grads.check import LossScaler


@dataclass
class Fp16:
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1


def reference(section: Fp16, overflows: list[bool]) -> list[float | None]:
    """The scale after each step as the rule is written down; None once it must raise."""
    scale, last, counter, scales = 2.0**section.initial_scale_power, -1, section.hysteresis, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if counter == 1:
                if scale == section.min_loss_scale:
                    return [*scales, None]
                scale = max(scale / 2, section.min_loss_scale)
            else:
                counter -= 1
            last = iteration
        else:
            if section.consecutive_hysteresis:
                counter = section.hysteresis
            interval = iteration - last - 1
            if interval > 0 and interval % section.loss_scale_window == 0:
                counter = section.hysteresis
                scale *= 2
        scales.append(scale)
    return scales


@given(
    st.lists(st.booleans(), max_size=60),
    st.builds(
        Fp16,
        initial_scale_power=st.integers(2, 5),
        loss_scale_window=st.integers(1, 4),
        hysteresis=st.integers(1, 3),
        consecutive_hysteresis=st.booleans(),
        min_loss_scale=st.sampled_from([1, 3, 0.25]),
    ),
)
def test_every_history_follows_the_rule(overflows: list[bool], section: Fp16) -> None:
    scaler = LossScaler(section)
    for overflow, expected in zip(overflows, reference(section, overflows), strict=False):
        if expected is None:
            with pytest.raises(NonFiniteError):
                scaler.update(overflow)
            break
        scaler.update(overflow)
        assert scaler.scale == expected


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; 'x' is an overflow, '.' is none."""
    seen = []
    for letter in overflows:
        scaler.update(letter == "x")
        seen.append(scaler.scale)
    return seen


def test_by_hand_the_first_overflow_only_uses_a_credit_and_growth_refills_it() -> None:
    scaler = LossScaler(Fp16(initial_scale_power=4, loss_scale_window=2))
    #                             x   x  x  .  .  .   x   x
    assert scales(scaler, "xxx...xx") == [16, 8, 4, 4, 4, 8, 8, 4]


def test_by_hand_growth_counts_from_the_start_and_again_every_window() -> None:
    assert scales(LossScaler(Fp16(initial_scale_power=2, loss_scale_window=3)), ".......") == [4, 4, 4, 8, 8, 8, 16]


def test_by_hand_consecutive_hysteresis_refills_at_every_good_step() -> None:
    assert scales(LossScaler(Fp16(initial_scale_power=4, consecutive_hysteresis=True)), "x.x.xx") == [16] * 5 + [8]
    assert scales(LossScaler(Fp16(initial_scale_power=4)), "x.x.xx") == [16, 16, 8, 8, 4, 2]


def test_the_floor_raises_and_leaves_the_scale() -> None:
    scaler = LossScaler(Fp16(initial_scale_power=1, hysteresis=1, min_loss_scale=1))
    scaler.update(True)
    before = scaler.state_dict()
    with pytest.raises(NonFiniteError, match=r"min_loss_scale = 1, in step 2.*learning rate"):
        scaler.update(True)
    assert scaler.state_dict() == before


def test_a_static_scale_never_moves_nor_raises() -> None:
    scaler = LossScaler(Fp16(loss_scale=128.0, loss_scale_window=1))
    assert scales(scaler, "x" * 20 + "." * 20) == [128.0] * 40
    scaler.load_state_dict(LossScaler(Fp16(loss_scale=64.0)).state_dict())
    assert scaler.scale == 128.0


@given(st.text("x.", max_size=12), st.text("x.", max_size=12))
def test_a_saved_state_continues_bit_for_bit(before: str, after: str) -> None:
    scaler, resumed = (LossScaler(Fp16(initial_scale_power=30, loss_scale_window=2)) for _ in range(2))
    scales(scaler, before)
    resumed.load_state_dict(scaler.state_dict())
    assert scales(resumed, after) == scales(scaler, after)
    assert resumed.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_scale": float("nan")}, "fp16.loss_scale: expected a finite number"),
        ({"loss_scale": float("inf")}, "fp16.loss_scale: expected a finite number"),
        ({"loss_scale": -1}, "fp16.loss_scale: expected greater than or equal to 0"),
        ({"loss_scale_window": 0}, "expected loss_scale_window and min_loss_scale above 0"),
        ({"hysteresis": 0}, "fp16.hysteresis: expected greater than or equal to 1"),
        ({"min_loss_scale": 0}, "expected loss_scale_window and min_loss_scale above 0"),
        ({"min_loss_scale": float("nan")}, "fp16.min_loss_scale: expected a finite number"),
        ({"initial_scale_power": 2, "min_loss_scale": 8}, "fp16.min_loss_scale must be above 0 and at most"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LossScaler(load({"train_batch_size": 1, "fp16": {"enabled": True, **settings}}).fp16)


@pytest.mark.parametrize("state", [{}, {"scale": float("nan"), "step": 1, "last_overflow": 0, "credits": 1}])
def test_a_broken_state_is_refused(state: dict[str, float]) -> None:
    scaler = LossScaler(Fp16())
    with pytest.raises(ConfigError, match="loss scaler state"):
        scaler.load_state_dict(state)
    assert scaler.scale == 2.0**16
