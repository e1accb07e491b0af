"""PyTorch's own recipe, get_state_dict, dcp.load, set_state_dict, over our optimizers: what is loaded into a fresh pair
goes on with the bits of a run that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from tests.support.models import named_weights, rows, two_layers
from tests.support.pairwise import by_turns
from tests.support.trainers import Plain, same_bits, tiered
from tiered_zero.optim import OffloadedOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01),
}
OPTIONS = [
    {},
    {"flatten_optimizer_state_dict": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
]


@contextmanager
def opened(name: str, swap_path: Path, kind: str = "adam") -> Any:
    """A trainer over a new model: plain, an engine with everything on a tier, or a plain loop with our optimizer."""
    if name == "plain":
        yield Plain(two_layers(), KINDS[kind])
    elif name.startswith("engine"):
        tier = name.removeprefix("engine-")
        with tiered(two_layers(), swap_path, (tier, tier), KINDS[kind]) as engine:
            yield engine
    elif name == "zero":
        yield Plain(
            two_layers(),
            lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, weight_decay=0.1),
        )
    else:
        offload = {"device": name, "nvme_path": str(swap_path)}
        trainer = Plain(
            two_layers(),
            lambda model: OffloadedOptimizer(model.parameters(), torch.optim.Adam, offload, lr=0.01, weight_decay=0.1),
        )
        with closing(trainer.optimizer):  # type: ignore[type-var]
            yield trainer


def steps(trainer: Any, first: int, number: int = 3) -> list[torch.Tensor]:
    """Take steps `first`, `first` + 1, ..., and return the weights then."""
    for index in range(first, first + number):
        trainer.backward(trainer(rows(index)).square().mean())
        trainer.step()
    return [value for _, value in named_weights(trainer.module)]


def move(source: Any, target: Any, path: Path, **chosen: Any) -> None:
    """Save `source` and load it into `target`, as PyTorch's documentation does."""
    options = StateDictOptions(**chosen)
    model, optimizer = get_state_dict(source.module, source.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)
    model, optimizer = get_state_dict(target.module, target.optimizer, options=options)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)
    set_state_dict(target.module, target.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *by_turns(["engine-none", "engine-cpu", "engine-nvme"], OPTIONS, 2),
        *by_turns(["cpu", "nvme"], OPTIONS, 2),
        *by_turns(["zero"], OPTIONS, 4),
    ],
)
def test_state_loaded_into_a_fresh_pair_keeps_its_moments(
    name: str, options: dict[str, Any], swap_path: Path, tmp_path: Path
) -> None:
    with opened("plain", swap_path) as plain, opened(name, swap_path) as source, opened(name, swap_path) as target:
        steps(source, 0)
        move(source, target, tmp_path / "saved", **options)
        expected = steps(plain, 0, 6)
        assert all(map(same_bits, expected, steps(source, 3)))
        assert all(map(same_bits, expected, steps(target, 3)))
        assert not name.startswith("engine") or target.global_steps == 3, "what torch steps to create state is no step"


@pytest.mark.parametrize("name", ["engine-nvme", "nvme"])
def test_the_recipe_for_tools_runs(name: str, swap_path: Path, tmp_path: Path) -> None:
    """It saves and loads the same pair, which goes on as if nothing had been."""
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    recipe = page.split("## PyTorch's recipes")[1].split("```python")[1].split("```")[0]
    with opened("plain", swap_path) as plain, opened(name, swap_path) as own:
        steps(own, 0)
        exec(recipe, {"model": own.module, "optimizer": own.optimizer, "path": tmp_path})
        assert all(map(same_bits, steps(plain, 0, 6), steps(own, 3)))


@pytest.mark.parametrize(("source", "target"), [("plain", "engine-nvme"), ("engine-cpu", "plain")])
@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_moves_state_between_plain_torch_and_an_engine(
    source: str, target: str, kind: str, swap_path: Path, tmp_path: Path
) -> None:
    with opened(source, swap_path, kind) as one, opened(target, swap_path, kind) as other:
        steps(one, 0)
        move(one, other, tmp_path / "saved")
        assert all(map(same_bits, steps(one, 3), steps(other, 3)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["engine-none", "engine-nvme"])
def test_torch_creates_the_state_that_it_creates_in_a_plain_optimizer(name: str, kind: str, swap_path: Path) -> None:
    """And training on from it has the plain optimizer's bits."""
    with opened("plain", swap_path, kind) as plain, opened(name, swap_path, kind) as engine:
        weights = [value.clone() for _, value in named_weights(engine.module)]
        found = [get_optimizer_state_dict(each.module, each.optimizer) for each in (plain, engine)]
        assert found[0]["param_groups"] == found[1]["param_groups"]
        for param, values in found[0]["state"].items():
            assert all(same_bits(value, found[1]["state"][param][key]) for key, value in values.items())
        assert engine.global_steps == engine.micro_steps == 0
        assert all(map(same_bits, weights, (value for _, value in named_weights(engine.module))))
        assert all(map(same_bits, steps(plain, 0), steps(engine, 0)))


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_first_step_whose_learning_rate_is_0_counts(gradient: float, swap_path: Path) -> None:
    """A schedule that warms up begins so, and where all of a batch is masked, gradients are zero."""
    with opened("plain", swap_path) as plain, opened("engine-cpu", swap_path) as engine:
        for trainer in (plain, engine):
            trainer.optimizer.param_groups[0]["lr"] = 0.0
            for param in trainer.module.parameters():
                param.grad = torch.full_like(param, gradient)
            trainer.step()
        assert engine.global_steps == 1
        for trainer in (plain, engine):
            trainer.optimizer.param_groups[0]["lr"] = 0.01
        assert all(map(same_bits, steps(plain, 0), steps(engine, 0)))
    with opened("engine-cpu", swap_path) as engine:
        engine.optimizer.param_groups[0]["lr"] = 0.0
        steps(engine, 0, 1)
        assert engine.global_steps == 1


def test_torch_creates_state_between_the_step_hooks(swap_path: Path) -> None:
    calls: list[str] = []
    with opened("engine-cpu", swap_path) as engine:
        engine.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        engine.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        get_optimizer_state_dict(engine.module, engine.optimizer)
        assert calls == ["before", "after"] and engine.global_steps == 0


class WithoutLr(Optimizer):
    """A class with another name for its learning rate, which torch leaves as it is when it creates state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                param.sub_(self.state[param]["sum"] + param, alpha=0.1)


def test_a_step_of_zero_gradients_without_an_lr_decays_weights_and_counts(swap_path: Path) -> None:
    plain = Plain(two_layers(), lambda model: WithoutLr(model.parameters()))
    with tiered(two_layers(), swap_path, ("cpu", "cpu"), lambda model: WithoutLr(model.parameters())) as engine:
        for trainer in (plain, engine):
            get_optimizer_state_dict(trainer.module, trainer.optimizer)
        assert engine.global_steps == 1
        assert all(map(same_bits, steps(plain, 0), steps(engine, 0)))


def test_torch_creates_that_state_where_gradients_rest_on_nvme(swap_path: Path) -> None:
    """The staging buffers have room for gradients, which an update without a backward does not read."""
    runtime = {"gradients": "nvme", "debug_poison": True}
    with (
        opened("plain", swap_path) as plain,
        tiered(two_layers(), swap_path, make_optimizer=KINDS["adam"], runtime=runtime) as engine,
    ):
        found = [get_optimizer_state_dict(each.module, each.optimizer)["state"] for each in (plain, engine)]
    for param, values in found[0].items():
        assert all(same_bits(value, found[1][param][key]) for key, value in values.items())
