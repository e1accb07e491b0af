"""When autograd is through a module: what the marks of uses say, on graphs of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.units import make_unit
from tiered_zero.grads.gradient import UnitGradients
from tiered_zero.grads.reduce import UnitUses


class Layer(nn.Module):
    """Two weights, of which a call uses the first, or the other. The unit is never complete by its gradients alone."""

    def __init__(self, watch: Watch, index: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(2))
        unit = make_unit(index, [16, 16])
        self.home = UnitGradients(unit=unit, flat=torch.zeros(unit.numel), spare=None, on_device=True)
        self.watch = watch
        for entry, weight in zip(unit.entries, self.weights, strict=True):
            weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, param=entry.param.index: watch.take(self.home, param)
            )

    def forward(self, x: Tensor, chosen: int = 0) -> Tensor:
        if torch._C._current_graph_task_id() == -1:
            uses = self.watch.uses
            uses.note([self.home.unit], [None, x], uses.meet)
        return (x @ self.weights[chosen]).tanh()


class Watch:
    """Layers in a row. `found`: of each gradient that came, the layer, and those whose units were complete then."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.uses = UnitUses()
        self.layers = [Layer(self, index) for index in range(3)]
        self.found: list[tuple[int, list[int]]] = []

    def take(self, home: UnitGradients, param: int) -> None:
        home.arrived.add(param)
        self.found.append((home.unit.index, self.complete()))

    def complete(self) -> list[int]:
        return [index for index, layer in enumerate(self.layers) if self.uses.is_complete(layer.home)]

    def backward(self, loss: Tensor, retain_graph: bool = False) -> list[tuple[int, list[int]]]:
        """Returns `found`, and at its end what was complete in the end."""
        self.found = []
        loss.square().mean().backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        found = [*self.found, (-1, self.complete())]
        self.uses.end_backward(layer.home for layer in self.layers)
        for layer in self.layers:
            layer.home.arrived.clear()
        return found


def rows() -> Tensor:
    """An activation."""
    return torch.ones(2, 4) @ torch.ones(4, 4, requires_grad=True)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_unit_is_complete_once_backward_is_through_its_module(reentrant: bool | None) -> None:
    """Though one of its parameters gets no gradient, in the first backward, and in a later one with the other."""
    watch = Watch()
    for chosen in (0, 1, 0):
        x = rows()
        for layer in watch.layers:
            x = layer(x, chosen) if reentrant is None else checkpoint(layer, x, chosen, use_reentrant=reentrant)
        assert watch.backward(x) == [(2, []), (1, [2]), (0, [1, 2]), (-1, [0, 1, 2])]


@pytest.mark.parametrize("retain_graph", [False, True])
def test_of_several_uses_the_first_ends_a_unit(retain_graph: bool) -> None:
    watch = Watch()
    first, second, third = watch.layers
    x = third(first(second(first(rows()))), 1)
    found = watch.backward(x, retain_graph)
    assert found == [(2, []), (1, [2]), (0, [1, 2]), (-1, [0, 1, 2])]
    if retain_graph:
        assert watch.backward(x)[-1] == (-1, [0, 1, 2])


def test_a_backward_from_the_middle_passes_what_came_later() -> None:
    watch = Watch()
    first, second, third = watch.layers
    x = second(first(rows()))
    out = third(x)
    assert watch.backward(x, retain_graph=True) == [(1, [2]), (0, [1, 2]), (-1, [0, 1, 2])]
    assert watch.backward(out) == [(2, []), (1, [2]), (0, [1, 2]), (-1, [0, 1, 2])]


def test_two_forwards_before_one_backward_end_a_unit_together() -> None:
    watch = Watch()

    def forward(layers: Sequence[Layer], chosen: int) -> Tensor:
        x = rows()
        for layer in layers:
            x = layer(x, chosen)
        return x

    found = watch.backward(forward(watch.layers, 0) + forward(watch.layers, 1))
    assert [index for index, _ in found] == [2, 1, 0, 2, 1, 0, -1]
    assert [complete for _, complete in found[:4]] == [[]] * 3 + [[2]], "both weights of layer 2 have come"
    assert found[-1] == (-1, [0, 1, 2])
    apart = forward(watch.layers, 0), forward(watch.layers, 1)
    assert watch.backward(apart[1])[-1] == (-1, []), "the first forward may be a part of it: its end alone says"
    assert watch.backward(apart[0])[-1] == (-1, [0, 1, 2])


def test_without_an_activation_a_unit_ends_with_the_parameters_that_had_gradients_before() -> None:
    """A leaf's gradient is not in the order of forward."""
    for x in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)):
        watch = Watch()
        first = watch.layers[0]
        assert watch.backward(first(x)) == [(0, [1, 2]), (-1, [1, 2])]
        assert watch.backward(first(x)) == [(0, [0, 1, 2]), (-1, [0, 1, 2])]


def test_a_use_ends_with_its_graph() -> None:
    """A unit that this backward's graph has no use of is complete at once, though an earlier micro-batch used it."""
    watch = Watch()
    x = rows()
    for layer in watch.layers:
        x = layer(x)
    watch.backward(x)
    x = watch.layers[2](rows())
    assert watch.backward(x) == [(2, [0, 1]), (-1, [0, 1, 2])]
    del x
    assert watch.complete() == [0, 1, 2]


def test_a_graph_that_is_dropped_with_its_step_may_still_run() -> None:
    watch = Watch()
    x = watch.layers[0](rows())
    watch.uses.abort()
    assert watch.backward(x) == [(0, [0, 1, 2]), (-1, [0, 1, 2])]


class Dropping(int):
    """A unit's index that drops the graph the `count`-th time that it is looked for: a collection may run anywhere."""

    count: int
    graph: list[Tensor]

    def __hash__(self) -> int:
        self.count -= 1
        if not self.count:
            self.graph.clear()
        return super().__hash__()


@pytest.mark.parametrize("count", range(1, 8))
def test_a_graph_may_end_while_its_marks_are_read(count: int) -> None:
    watch = Watch()
    home = watch.layers[0].home
    index = Dropping(0)
    index.graph = [watch.layers[0](rows())]
    assert not watch.uses.is_complete(home)
    index.count = count
    watch.uses.is_complete(replace(home, unit=replace(home.unit, index=index)))
    assert (index.graph == []) == (index.count <= 0)
    index.graph.clear()
    assert watch.uses.is_complete(home)
