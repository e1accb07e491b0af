"""Memory that is shared with a parameter before the start: refused by name, unless nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.configs import config_of, zero_section
from tests.support.trainers import assert_parity, tiered


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.b(torch.relu(self.a(x))))).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def course(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        torch.manual_seed(number)
        loss = trainer(torch.randn(4, 8))
        trainer.backward(loss)
        trainer.step()
        seen += [loss.detach(), trainer.get_global_grad_norm()]
    return seen


def same_data(net: Net) -> None:
    net.a.weight.data = net.b.weight.data


def two_over_one(net: Net) -> None:
    shared = torch.randn(8, 8)
    net.a.weight, net.b.weight = nn.Parameter(shared), nn.Parameter(shared)


def overlapping_views(net: Net) -> None:
    shared = torch.randn(12, 8)
    net.a.weight, net.b.weight = nn.Parameter(shared[:8]), nn.Parameter(shared[4:])


def overlapping_columns(net: Net) -> None:
    shared = torch.randn(8, 12)
    net.a.weight, net.b.weight = nn.Parameter(shared[:, :8]), nn.Parameter(shared[:, 4:])


SHARED: dict[str, Callable[[Net], None]] = {
    "data": same_data,
    "one tensor": two_over_one,
    "views": overlapping_views,
    "columns": overlapping_columns,
}


@pytest.mark.parametrize("way", SHARED)
def test_parameters_that_share_memory_are_refused(way: str, swap_path: Any) -> None:
    net = Net()
    SHARED[way](net)
    with pytest.raises(tiered_zero.errors.ModelError, match=r"arameter a\.weight and parameter b\.weight share memory"):
        tiered(net, swap_path, make_optimizer=sgd)


def test_a_buffer_over_a_parameter_is_refused(swap_path: Any) -> None:
    net = Net()
    net.a.register_buffer("seen", net.a.weight.data[2:4])
    with pytest.raises(tiered_zero.errors.ModelError, match=r"arameter a\.weight and buffer a\.seen share memory"):
        tiered(net, swap_path, make_optimizer=sgd)


def test_expanded_parameters_are_refused(swap_path: Any) -> None:
    net = Net()
    net.a.weight = nn.Parameter(torch.randn(8, 1).expand(8, 8))
    with pytest.raises(tiered_zero.errors.ModelError, match=r"Elements of parameter a\.weight share memory"):
        tiered(net, swap_path, make_optimizer=sgd)


def test_what_shares_nothing_that_changes_is_fine(swap_path: Any) -> None:
    """Disjoint parts of one storage, a real tie, a loss whose graph is still there, spectral norm's own attribute."""
    held: list[torch.Tensor] = []

    def build() -> Net:
        net = Net()
        rows, columns = torch.randn(16, 8), torch.randn(8, 16)
        net.a.weight, net.b.weight = nn.Parameter(rows[:8]), nn.Parameter(rows[8:])
        net.c, net.d = nn.Linear(8, 8), nn.Linear(8, 8)
        net.c.weight, net.d.weight = nn.Parameter(columns[:, :8]), nn.Parameter(columns[:, 8:])
        net.d.bias = net.c.bias
        net.e = torch.nn.utils.spectral_norm(nn.Linear(8, 8))
        held.append(net(torch.randn(2, 8)))
        return net

    assert_parity(build, course, swap_path, make_optimizer=sgd)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("how", ["trace", "script"])
def test_compiled_torchscript_is_refused(how: str, swap_path: Any) -> None:
    net = Net()
    x = torch.randn(2, 8)
    net.a = torch.jit.trace(net.a, x) if how == "trace" else torch.jit.script(net.a)
    with pytest.raises(tiered_zero.errors.ModelError, match=r"Module a is compiled TorchScript"):
        tiered(net, swap_path, make_optimizer=sgd)


# -- what is replaced later --------------------------------------------------------------------------------------------


def new_parameter(net: Net) -> None:
    net.out.weight = nn.Parameter(torch.randn(1, 8))


def swapped(net: Net) -> None:
    net.a.weight, net.b.weight = net.b.weight, net.a.weight


def tied_later(net: Net) -> None:
    net.b.weight = net.a.weight


def new_head(net: Net) -> None:
    net.out = nn.Linear(8, 1)


def removed(net: Net) -> None:
    net.out.register_parameter("bias", None)


REPLACED = [new_parameter, swapped, tied_later, new_head, removed]
CALLS: dict[str, Callable[[tiered_zero.Engine], Any]] = {
    "step": lambda engine: engine.step(),
    "state_dict": lambda engine: engine.module.state_dict(),
    "save_checkpoint": lambda engine: engine.save_checkpoint("never written"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("replace", REPLACED)
def test_parameters_replaced_after_the_start_are_refused(
    replace: Callable[[Net], None], call: str, swap_path: Any
) -> None:
    with tiered(Net(), swap_path, make_optimizer=sgd) as engine:
        engine.backward(engine(torch.ones(2, 8)))
        former = copy.copy(engine.module._modules), [dict(m._parameters) for m in engine.module.modules()]
        modules = list(engine.module.modules())
        replace(engine.module)  # type: ignore[arg-type]
        with pytest.raises(tiered_zero.errors.ModelError, match=r"Parameter (a|b|out)\.(weight|bias) is not the one"):
            CALLS[call](engine)
        engine.module._modules.update(former[0])
        for module, params in zip(modules, former[1], strict=True):
            module._parameters.update(params)
        engine.step()
        assert len(engine.module.state_dict()) == 6


class Adapter(nn.Module):
    """What a library for adapters puts around a layer."""

    def __init__(self, inner: nn.Module, trainable: bool = True) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(8), requires_grad=trainable)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def wrap(net: Net) -> None:
    net.a = Adapter(net.a)  # type: ignore[assignment]


def register(net: Net) -> None:
    net.b.register_parameter("scale", nn.Parameter(torch.ones(8)))


def register_a_module(net: Net) -> None:
    net.out.add_module("head", nn.Linear(8, 8))


def fill_a_name(net: Net) -> None:
    net.out.spare = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("add", [wrap, register, register_a_module, fill_a_name])
def test_trainable_parameters_that_are_added_after_the_start_are_refused(
    add: Callable[[Net], None], call: str, swap_path: Any
) -> None:
    net = Net()
    net.out.register_parameter("spare", None)
    with tiered(net, swap_path, make_optimizer=sgd) as engine:
        engine.backward(engine(torch.ones(2, 8)))
        add(engine.module)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(tiered_zero.errors.ModelError, match=r"(scale|weight|spare) requires a gradient, but"):
                CALLS[call](engine)


def test_frozen_parameters_may_be_added_and_stay_frozen(swap_path: Any) -> None:
    with tiered(Net(), swap_path, make_optimizer=sgd) as engine:
        adapter = Adapter(engine.module.a, trainable=False)
        engine.module.a = adapter
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        adapter.scale.requires_grad_(True)
        engine.backward(engine(torch.ones(2, 8)))
        with pytest.raises(tiered_zero.errors.ModelError, match=r"a\.scale requires a gradient, but was frozen"):
            engine.step()
        adapter.scale.requires_grad_(False)
        engine.step()


def test_what_replaces_an_added_parameter_is_checked(swap_path: Any) -> None:
    with tiered(Net(), swap_path, make_optimizer=sgd) as engine:
        engine.module.a = adapter = Adapter(engine.module.a, trainable=False)
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        adapter.scale = nn.Parameter(torch.ones_like(adapter.scale))
        engine.backward(engine(torch.ones(2, 8)))
        with pytest.raises(tiered_zero.errors.ModelError, match=r"a\.scale requires a gradient, but"):
            engine.step()
        adapter.scale.requires_grad_(False)
        engine.step()


def test_an_engine_that_evaluates_takes_new_parameters(swap_path: Any) -> None:
    config = config_of(zero_section("cpu", "none", swap_path))
    with tiered_zero.initialize(model=Net(), config=config)[0] as engine:
        expected = engine(torch.ones(2, 8))
        engine.module.a = Adapter(engine.module.a)
        assert torch.equal(engine(torch.ones(2, 8)), expected)


def test_loading_by_assignment_is_refused(swap_path: Any) -> None:
    weights = {name: value.clone() for name, value in Net().state_dict().items()}
    with tiered(Net(), swap_path, make_optimizer=sgd) as engine:
        with pytest.raises(tiered_zero.errors.ModelError, match="assign=True"):
            engine.module.load_state_dict(weights, assign=True)
        engine.module.load_state_dict(weights)
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()


def test_a_wrapper_around_the_same_parameters_is_fine(swap_path: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    with tiered(Net(), swap_path, make_optimizer=sgd) as engine:
        engine.module.a = Wrapper(engine.module.a)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()


def test_a_loss_without_a_gradient_is_refused(swap_path: Any) -> None:
    """As where everything was frozen after the start."""
    with tiered(Net(), swap_path, make_optimizer=sgd) as engine:
        engine.module.requires_grad_(False)
        with pytest.raises(tiered_zero.errors.ModelError, match=r"requires no gradient.*frozen"):
            engine.backward(engine(torch.ones(2, 8)))
        engine.module.requires_grad_(True)
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()


def test_a_loss_that_is_no_tensor_is_refused(swap_path: Any) -> None:
    with tiered(Net(), swap_path, make_optimizer=sgd) as engine:
        loss = engine(torch.ones(2, 8))
        with pytest.raises(tiered_zero.errors.ModelError, match=r"takes the loss as a tensor; found float"):
            engine.backward(loss.item())
        engine.backward(loss)
        engine.step()
