"""What scripts written for DeepSpeed rely on: its names, its calls, its answers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
OFFLOADED: dict[str, Any] = {
    "stage": 3,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "stage3_param_persistence_threshold": 0,
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def test_a_step_within_an_accumulation_applies_nothing() -> None:
    with tiered_zero.initialize(model=make_model(), config={**CONFIG, "gradient_accumulation_steps": 2})[0] as engine:
        seen = []
        for step in range(4):
            engine.backward(engine(batch(step)).sum())
            engine.step()
            seen.append(engine.was_step_applied())
        assert seen == [False, True, False, True]


def test_the_unit_in_use_fits_where_fewer_live_parameters_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    zero = {**OFFLOADED, "stage3_max_live_parameters": 10}
    with tiered_zero.initialize(model=make_model(), config={**CONFIG, "zero_optimization": zero})[0] as engine:
        engine.backward(engine(batch()).sum())
        engine.step()
    assert "stage3_max_live_parameters: 10 is less than the 2048 elements that are in use at once" in caplog.text
