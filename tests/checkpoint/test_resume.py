"""A run that was stopped and goes on has the bits of the run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.inspection import differences, everything
from tests.support.models import ParityGPT, batch
from tests.support.trainers import PLACEMENTS, tiered


def build(seed: int) -> ParityGPT:
    torch.manual_seed(seed)
    return ParityGPT()


def train(engine: tiered_zero.Engine, first: int, stop: int) -> None:
    for number in range(first, stop):
        engine.backward(engine(*batch(number), number % 3 == 1))
        engine.step()


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_another_run_goes_on_with_the_same_bits(placement: tuple[str, str], swap_path: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bf16": {"enabled": True}}
    with tiered(build(0), swap_path, placement, **options) as engine:
        train(engine, 0, 2)
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        train(engine, 2, 4)
        expected = everything(engine)
    with tiered(build(1), swap_path, placement, **options) as engine:
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step2")
        assert client_state == {"epoch": 3}
        assert (engine.global_steps, engine.micro_steps) == (2, 2)
        train(engine, 2, 4)
        assert differences(expected, everything(engine)) == []
