"""Whoever clips or looks at gradients that the run has taken is told once; nobody else is."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero

pytestmark = pytest.mark.usefixtures("one_thread")

USES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "zero_grad": lambda model: model.zero_grad(),
    "a look": lambda model: [param.grad for param in model.parameters()],
}
TEXT = "backward has taken the gradients: parameter.grad is None until the next one"


def build(path: Path, device: str, threshold: int = 0, update: str = "overlapped") -> tiered_zero.Engine:
    tier = {"device": device, **({"nvme_path": str(path)} if device == "nvme" else {})}
    zero = {"stage": 3, "offload_param": {**tier, "max_in_cpu": 0}, "offload_optimizer": tier}
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": threshold},
        "tiered_zero": {"device": "cpu", "update": update},
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].bias.requires_grad_(False)
    return tiered_zero.initialize(model=model, config=config)[0]


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum(TEXT in message for message in caplog.messages)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(("device", "threshold"), [("none", 0), ("cpu", 0), ("nvme", 0), ("cpu", 1000)])
@pytest.mark.parametrize("update", ["barrier", "overlapped"])
def test_between_backward_and_step_it_is_said_once(
    use: Callable[[nn.Module], Any],
    device: str,
    threshold: int,
    update: str,
    swap_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not before, nor after, and never by the run itself."""
    caplog.set_level(logging.WARNING)
    with build(swap_path, device, threshold, update) as engine:

        def micro_batch(then: Callable[[], Any] = lambda: None) -> None:
            loss = engine(torch.ones(4, 8)).square().mean()
            engine.backward(loss)
            then()
            engine.step()

        use(engine.module)
        micro_batch()
        micro_batch()  # adds to gradients that are held
        use(engine.module)
        micro_batch()
        assert told(caplog) == 0
        micro_batch(lambda: use(engine.module))
        assert told(caplog) == 1
        micro_batch(lambda: use(engine.module))
        assert told(caplog) == 1


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_parameters_are_plain_in_forward_and_whole_in_between(device: str, swap_path: Path) -> None:
    seen: list[type] = []
    with build(swap_path, device) as engine:
        engine.module[1].register_forward_hook(lambda *_: seen.append(type(engine.module[0].weight)))
        for step in range(4):
            loss = engine(torch.ones(4, 8)).square().mean()
            engine.backward(loss)
            weight = engine.module[0].weight
            assert weight.grad is None
            with tiered_zero.gathered(engine.module):
                copied = copy.deepcopy(engine.module[2].bias)
                assert torch.equal(engine.module[2](torch.zeros(8)), copied)
            assert type(copied) is nn.Parameter
            weight.grad = torch.ones(8, 8)
            assert weight.grad.sum() == 64
            del weight.grad
            assert weight.grad is None
            engine.step()
            assert engine.global_steps == (step + 1) // 2
    if device == "none":
        assert {type(param) for param in engine.module.parameters()} == {nn.Parameter}
        assert seen == [nn.Parameter] * 4
