"""What scripts written for DeepSpeed rely on: its names, its calls, its answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tiered_zero.errors import ModelError

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


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_engine_without_an_optimizer_evaluates(device: str, frozen: bool, swap_path: Path) -> None:
    model = make_model().requires_grad_(not frozen)
    expected, weights = model(batch()).detach(), {name: value.clone() for name, value in model.state_dict().items()}
    zero = {**OFFLOADED, "offload_param": {"device": device, "nvme_path": str(swap_path), "max_in_cpu": 0}}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "bf16": {"enabled": False}}
    engine, optimizer, loader, scheduler = tiered_zero.initialize(model=model, config=config)
    with engine:
        assert (optimizer, engine.optimizer, loader, scheduler, engine.get_lr()) == (None, None, None, None, [])
        engine.eval()
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(engine(batch()), expected)
        found = engine.module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        with tiered_zero.gathered(engine.module):
            assert torch.equal(next(engine.module.parameters()), weights["0.weight"])
        loss = engine(batch().requires_grad_()).sum()
        with pytest.raises(ModelError, match="This engine evaluates: initialize"):
            engine.backward(loss)
        with pytest.raises(ModelError, match="This engine evaluates: initialize"):
            engine.step()
        if not frozen:
            with pytest.raises(ModelError, match="This engine evaluates: initialize"):
                engine(batch()).sum().backward()
        with torch.no_grad():
            assert torch.equal(engine(batch()), expected)


def test_in_half_precision_an_evaluation_takes_two_bytes_an_element() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": OFFLOADED, "bf16": {"enabled": True}}
    with tiered_zero.initialize(model=make_model(), config=config)[0] as engine:
        assert engine(batch().bfloat16()).dtype == torch.bfloat16
        assert {row.kind for row in engine.plan.rows} == {"param", "param_window"}
