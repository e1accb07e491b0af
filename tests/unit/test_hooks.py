"""Other people's hooks on the same modules: they find the parameters, and their errors stay their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.configs import SMALL_DEVICE
from tiered_zero import Engine
from tiered_zero.unit.guard import OffloadedParameter, class_in_use

CONFIG: dict[str, Any] = {
    "train_batch_size": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    },
    "tiered_zero": {**SMALL_DEVICE, "unit_size_cap": 1, "device": "cpu"},
}

Start = Callable[[nn.Module], Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def make(model: nn.Module) -> Engine:
        engine, *_ = tiered_zero.initialize(model=model, config=CONFIG)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 1))


def train(engine: Engine) -> float:
    loss = engine(torch.ones(1, 8)).sum()
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("where", ["pre-hook", "hook", "forward"])
def test_an_error_in_the_middle_is_raised_as_it_is_and_training_goes_on(start: Start, where: str) -> None:
    model, failing = nested(), [False]

    def fail(*_: Any) -> None:
        if failing[0]:
            raise ValueError("the user's own")

    inner = model[0][1]  # type: ignore[index]
    if where == "pre-hook":
        inner.register_forward_pre_hook(fail)
    elif where == "hook":
        inner.register_forward_hook(fail)
    else:
        model[0].insert(1, Failing(fail))  # type: ignore[operator]
    engine = start(model)
    first = train(engine)
    failing[0] = True
    with pytest.raises(ValueError, match="the user's own"):
        engine(torch.ones(1, 8))
    assert all(isinstance(param, OffloadedParameter) for param in model.parameters()), "nothing stays lent"
    failing[0] = False
    assert train(engine) < first


class Failing(nn.Module):
    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__()
        self.fail = fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fail()
        return x


def test_hooks_that_were_there_before_find_the_parameters_in_use(start: Start) -> None:
    model, seen = nested(), []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(type(module.weight))

    for module in (model[0][0], model[1]):  # type: ignore[index]
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    engine = start(model)
    engine(torch.ones(1, 8))
    assert seen == [class_in_use(nn.Parameter)] * 4


def test_remove_takes_every_hook_off(start: Start) -> None:
    model = nested()

    def count() -> int:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
        return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)

    engine = start(model)
    assert count() > 0
    engine.close()
    assert count() == 0
