"""Which parameters the groups of an optimizer have is settled when the run starts; their values are live."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.models import rows as batch
from tests.support.trainers import Plain, assert_same_bits, follow, tiered
from tiered_zero.errors import ModelError
from tiered_zero.update.handle import ParamGroupWatch

pytestmark = pytest.mark.usefixtures("one_thread")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(layer.parameters())} for layer in (model[0], model[2])], lr=0.1)


def step(trainer: Any, number: int) -> None:
    trainer.backward(trainer(batch(number)).square().mean())
    trainer.step()


@pytest.fixture(params=[("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def engine(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[tiered_zero.Engine]:
    """Those without clipping whose updates run beside compute begin them in backward."""
    with tiered(build(), swap_path, request.param, two_groups) as engine:
        yield engine


Change = Callable[[Any], Any]
CHANGES: dict[str, tuple[Change, str]] = {
    "a parameter less": (lambda o: o.param_groups[1]["params"].pop(), "Group 1 .*the 2 parameters.* found 1"),
    "another list of parameters": (
        lambda o: o.param_groups[0].update(params=o.param_groups[0]["params"][:1]),
        "Group 0 .*the 2 parameters",
    ),
    "another parameter": (
        lambda o: o.param_groups[0]["params"].__setitem__(0, nn.Parameter(torch.ones(8, 8))),
        "Group 0 .* or others",
    ),
    "a parameter moved": (
        lambda o: o.param_groups[1]["params"].append(o.param_groups[0]["params"].pop()),
        "Group 0 .* found 1",
    ),
    "no parameters": (lambda o: o.param_groups[0].pop("params"), "Group 0 .* found 0"),
    "a group less": (lambda o: o.param_groups.pop(), "to have 2 groups.* found 1"),
    "another list of groups": (
        lambda o: setattr(o, "param_groups", [{**group, "lr": 0.0} for group in o.param_groups]),
        "replaced by another list",
    ),
    "fused": (lambda o: o.param_groups[1].update(fused=True), "Group 1 .*fused=False.* found fused=True"),
    "differentiable": (lambda o: o.param_groups[0].update(differentiable=True), "found differentiable=True"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_set_of_parameters_is_refused_before_a_weight_changes(engine: Any, change: str) -> None:
    act, message = CHANGES[change]
    step(engine, 0)
    groups = engine.optimizer.param_groups
    before = copy.copy(groups), [{**group, "params": list(group["params"])} for group in groups]
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    act(engine.optimizer)
    for _ in range(2):
        with pytest.raises(ModelError, match=message):
            step(engine, 1)
    assert all(torch.equal(value, weights[name]) for name, value in engine.module.state_dict().items())
    groups[:] = before[0]
    for group, values in zip(groups, before[1], strict=True):
        group.update(values)
    engine.optimizer.param_groups = groups
    step(engine, 1)


def test_the_users_own_instance_is_watched_too(swap_path: Path) -> None:
    model = build()
    own = two_groups(model)
    with tiered(model, swap_path, ("cpu", "cpu"), lambda _: own) as engine:
        step(engine, 0)
        own.param_groups = [dict(group) for group in own.param_groups]
        with pytest.raises(ModelError, match="replaced by another list"):
            step(engine, 1)


def test_a_group_with_the_same_parameters_may_take_the_place_of_another(engine: Any) -> None:
    def script(trainer: Any) -> list[Any]:
        for number in range(4):
            groups = trainer.optimizer.param_groups
            groups[number % 2] = {**groups[number % 2], "lr": 0.1 * number}
            step(trainer, number)
        return []

    assert_same_bits(follow(script, Plain(build(), two_groups)), follow(script, engine))


def test_it_keeps_no_optimizer() -> None:
    optimizer = two_groups(build())
    watch = ParamGroupWatch([optimizer])
    optimizer.param_groups = []
    with pytest.raises(ModelError, match="replaced"):
        watch.check()
    del optimizer
    gc.collect()
    watch.check()
    ParamGroupWatch([]).check()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_no_object_of_a_run_is_copied(engine: Any, copied: Callable[[Any], Any]) -> None:
    step(engine, 0)
    own = engine.optimizer._source
    for one, message in ((engine, "engine cannot be copied"), (engine.optimizer, "state rests"), (own, "state rests")):
        with pytest.raises(ModelError, match=message):
            copied(one)
    with pytest.raises(ModelError, match="engine cannot be copied"):
        copy.copy(engine)
    step(engine, 1)
