"""Every optimizer that torch has, and ones that need whole parameters, in fp32: plain PyTorch's bits after four steps.

Elementwise ones are cut inside parameters (sub-groups of 2048 elements); the others get whole parameters.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.models import ParityGPT, batch, groups, matrices, named_weights
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, same_bits, tiered, train
from tiered_zero.rules.native_rules import Lion
from tiered_zero.rules.torch_rule import ELEMENTWISE, REFUSED

OPTIONS: dict[type[Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "maximize": True}],
    torch.optim.Adam: [{"lr": 3e-3}, {"lr": 3e-3, "amsgrad": True, "foreach": True}],
    torch.optim.AdamW: [{"lr": 3e-3, "amsgrad": True}],
    torch.optim.Adagrad: [{"lr": 0.01, "lr_decay": 0.01, "initial_accumulator_value": 0.1}],
    torch.optim.RMSprop: [{"lr": 1e-3, "momentum": 0.9}],
    torch.optim.Adadelta: [{}],
    torch.optim.Adamax: [{}],
    torch.optim.NAdam: [{"decoupled_weight_decay": True}],
    torch.optim.RAdam: [{"lr": 0.01}],
    torch.optim.ASGD: [{"t0": 4}],
    torch.optim.Rprop: [{}],
    Lion: [{"lr": 1e-3}],
}


class RowScaled(Optimizer):
    """A user's own: momentum over gradients divided by the norm of their row. What it does depends on the shape."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                state["step"] = state.get("step", 0) + 1
                norm = param.grad.norm(dim=-1, keepdim=True)
                momentum.mul_(0.9).add_(param.grad / (norm + 1e-6) / param.dim())
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    momentum, alpha=group["lr"] / state["step"] ** 0.5
                )


class Averaging(Optimizer):
    """A user's own, whose param groups count the steps and keep a running weight, as schedule-free methods do; its
    formula is another one from the sixth step on."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0, "weight_sum": torch.tensor(0.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr = group["lr"] * (1.0 if group["k"] < 5 else 0.5)
            group["largest_lr"] = max(lr, group.get("largest_lr", 0.0))
            group["weight_sum"] = group["weight_sum"] + group["largest_lr"] ** 2
            share = (group["largest_lr"] ** 2 / group["weight_sum"]).item()
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.clone())
                    param.lerp_(z, share)
                    z.sub_(param.grad, alpha=lr)
            group["k"] += 1


WHOLE = {
    "Adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=0.01),
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=0.01),
    "RowScaled": lambda model: RowScaled(groups(model)),
    "Averaging": lambda model: Averaging(groups(model)),
    "AdamW-fused": lambda model: torch.optim.AdamW(groups(model), lr=3e-3, fused=True),
}
"""Those that are given whole parameters. Muon takes matrices only: the other parameters are in no group, and stay."""


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT(num_blocks=1)


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 3 == 1)


def make(kind: type[Optimizer], options: dict[str, Any], model: nn.Module) -> Optimizer:
    return kind(groups(model), **options)


def compare(make_optimizer, swap_path, placement, clipping=0.7):
    plain = follow(partial(train, data=data), Plain(build(), make_optimizer, clipping=clipping))
    engine = tiered(build(), swap_path, placement, make_optimizer, clipping=clipping)
    assert_same_bits(plain, follow(partial(train, data=data), engine))


def test_every_optimizer_of_torch_has_its_row():
    classes = {kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    named = {getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)}
    assert classes - {Optimizer} == (set(OPTIONS) - {Lion}) | named | set(REFUSED)
    assert set(OPTIONS) == set(ELEMENTWISE)


@pytest.mark.parametrize(
    ("kind", "options", "placement"),
    [
        pytest.param(kind, options, FAR[(i + number) % 2], id=f"{kind.__name__}{i}")
        for number, (kind, rows) in enumerate(OPTIONS.items())
        for i, options in enumerate(rows)
    ],
)
def test_elementwise(kind, options, placement, swap_path):
    """In host memory or on nvme: the rule sees tensors, and the tiers are compared where they are the subject."""
    compare(partial(make, kind, options), swap_path, placement)


@pytest.mark.parametrize(
    ("name", "placement"), by_turns(list(WHOLE), [("none", "none"), ("none", "nvme"), ("nvme", "cpu")], 2)
)
def test_whole_parameters(name, placement, swap_path):
    compare(WHOLE[name], swap_path, placement)


@pytest.mark.parametrize("update", ["barrier", "overlapped"])
def test_groups_that_count_steps_advance_when_a_step_is_taken(update, swap_path):
    """Nothing is clipped, so that updates could begin in backward: an aborted step counts nothing. Schedulers and
    state_dict see the counts, and a state that is loaded brings them."""
    make_optimizer = WHOLE["Averaging"]
    plain = Plain(build(), make_optimizer)
    with tiered(build(), swap_path, ("cpu", "nvme"), make_optimizer, runtime={"update": update}) as engine:
        for number in range(8):
            if number == 3:
                engine.backward(engine(*data(number)))
                engine.abort_step()
            if number == 6:
                saved = engine.optimizer.state_dict()
                assert [group["k"] for group in saved["param_groups"]] == [6, 6]
                engine.optimizer.param_groups[0]["k"] = 99
                engine.optimizer.load_state_dict(saved)
            for trainer in (plain, engine):
                trainer.backward(trainer(*data(number)))
                trainer.step()
            assert values_of(plain.optimizer) == values_of(engine.optimizer)
        weights = dict(named_weights(engine.module))
        assert all(same_bits(value, weights[name]) for name, value in named_weights(plain.module))


def values_of(optimizer):
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
