"""What an offloaded parameter answers, and what it fetches or refuses."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.units import flat_of, make_params, make_unit
from tiered_zero.errors import ParameterOffloadedError
from tiered_zero.layout.flat import Unit
from tiered_zero.unit.guard import OffloadedParameter, class_in_use
from tiered_zero.unit.unit import FlatStorage

CPU = torch.device("cpu")


class Refusing:
    """A pager that refuses every fault; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.copy: torch.Tensor | None = None

    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        self.asked.append(function)
        raise ParameterOffloadedError(function)

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return self.copy

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        return None

    def watch(self, param: nn.Parameter) -> None:
        """Nobody looks."""


class Fetching:
    """A pager that fetches the whole unit at the first fault, with the values given."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.storage: FlatStorage | None = None
        self.num_faults = 0

    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        assert self.storage is not None
        self.num_faults += 1
        self.storage.fill()
        self.storage.flat.copy_(self.values)
        self.storage.unguard()

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return None

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        return None

    def watch(self, param: nn.Parameter) -> None:
        """Nobody looks."""


def offloaded(shape: tuple[int, ...] = (4, 4)) -> tuple[nn.Parameter, Refusing]:
    unit = make_unit(0, [torch.Size(shape).numel()])
    params = [nn.Parameter(torch.randn(shape))]
    pager = Refusing()
    storage = FlatStorage(_reshaped(unit, shape), params, CPU, pager)
    assert not storage.is_full and isinstance(params[0], OffloadedParameter)
    return params[0], pager


def _reshaped(unit: Unit, shape: tuple[int, ...]) -> Unit:
    (entry,) = unit.entries
    return replace(unit, entries=(replace(entry, param=replace(entry.param, shape=shape)),))


METADATA: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: tuple(p.shape) == (4, 4),
    "size": lambda p: p.size(0) == 4 and tuple(p.size()) == (4, 4),
    "dtype": lambda p: p.dtype is torch.float32,
    "device": lambda p: p.device == CPU,
    "layout": lambda p: p.layout is torch.strided,
    "numel": lambda p: p.numel() == p.nelement() == 16,
    "ndim": lambda p: p.ndim == p.dim() == p.ndimension() == 2,
    "stride": lambda p: p.stride() == (4, 1) and p.is_contiguous(),
    "len": lambda p: len(p) == 4,
    "nbytes": lambda p: p.nbytes == 64 and p.itemsize == p.element_size() == 4,
    "requires_grad": lambda p: p.requires_grad and p.is_leaf and p.grad_fn is None,
    "requires_grad_": lambda p: p.requires_grad_(False) is p and not p.requires_grad,
    "grad": lambda p: p.grad is None,
    "set grad": lambda p: setattr(p, "grad", torch.ones(4, 4)) is None and p.grad.sum() == 16,
    "is_floating_point": lambda p: p.is_floating_point() and not p.is_complex() and torch.is_floating_point(p),
    "is_cuda": lambda p: not p.is_cuda and not p.is_meta and not p.is_sparse,
    "hash": lambda p: hash(p) == id(p) and p in {p} and {p: 1}[p] == 1,
    "isinstance": lambda p: isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor),
    "is_tensor": lambda p: torch.is_tensor(p),
    "repr": lambda p: "offloaded" in repr(p) and "(4, 4)" in repr(p),
    "hook": lambda p: p.register_post_accumulate_grad_hook(lambda _: None).remove() is None,
    "version": lambda p: p._version >= 0,
    "like": lambda p: torch.zeros_like(p).sum() == 0 and torch.ones_like(p, dtype=torch.int64).sum() == 16,
    "new": lambda p: p.new_zeros(3).dtype is p.dtype and p.new_full((2,), 1.0).sum() == 2,
    "is_shared": lambda p: p.is_shared() in (False, True),
}


@pytest.mark.parametrize("question", METADATA)
def test_everything_but_the_bytes_is_answered(question: str) -> None:
    param, pager = offloaded()
    assert METADATA[question](param)
    assert pager.asked == []


X = torch.ones(4, 4)
BYTES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "matmul": lambda p: X @ p,
    "rmatmul": lambda p: p @ X,
    "torch.mm": lambda p: torch.mm(X, p),
    "out=": lambda p: torch.add(X, X, out=p),
    "linear": lambda p: functional.linear(X, p),
    "linear with keyword": lambda p: functional.linear(X, weight=p),
    "embedding": lambda p: functional.embedding(torch.tensor([1]), p),
    "layer_norm": lambda p: functional.layer_norm(X, (4, 4), p, p),
    "stack": lambda p: torch.stack([p, p]),
    "cat in a tuple": lambda p: torch.cat((X, p)),
    "einsum": lambda p: torch.einsum("ij,jk->ik", X, p),
    "index": lambda p: p[0],
    "index by": lambda p: X[p.to(torch.int64)],
    "setitem": lambda p: operator.setitem(p, 0, 1.0),
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(16),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", X),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.bfloat16),
    "float": lambda p: p.half(),
    "numpy": lambda p: p.numpy(),
    "item": lambda p: p.sum().item(),
    "tolist": lambda p: p.tolist(),
    "bool": lambda p: bool(p.any()),
    "eq": lambda p: p == X,
    "equal": lambda p: torch.equal(X, p),
    "allclose": lambda p: torch.allclose(X, p),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "foreach": lambda p: torch._foreach_norm([X, p]),
    "copy_": lambda p: p.copy_(X),
    "copy_ from": lambda p: X.clone().copy_(p),
    "add_": lambda p: p.add_(1),
    "init": lambda p: nn.init.zeros_(p),
    "where": lambda p: torch.where(X > 0, X, p),
    "iter": lambda p: list(p),
    "contains": lambda p: 1.0 in p,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "data_ptr": lambda p: p.data_ptr() > 0,
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "unbind": lambda p: p.unbind(),
    "format": lambda p: format(p[0, 0], ".2f"),
}


@pytest.mark.parametrize("use", BYTES)
@pytest.mark.parametrize("grad", [True, False])
def test_whatever_needs_the_bytes_asks_the_pager(use: str, grad: bool) -> None:
    param, pager = offloaded()
    with torch.set_grad_enabled(grad), pytest.raises(ParameterOffloadedError):
        BYTES[use](param)
    assert len(pager.asked) == 1


SAME = [use for use in BYTES if use not in ("set data", "out=", "copy_", "add_", "setitem", "init", "numpy", "save")]


@pytest.mark.parametrize("use", SAME)
def test_once_fetched_the_call_gives_what_a_plain_parameter_gives(use: str) -> None:
    values = torch.rand(4, 4)
    unit = _reshaped(make_unit(0, [16]), (4, 4))
    plain, param = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    pager = Fetching(flat_of(unit, [param]))
    pager.storage = FlatStorage(unit, [param], CPU, pager)
    with torch.no_grad():
        found, expected = BYTES[use](param), BYTES[use](plain)
    assert pager.num_faults == 1
    assert type(param) is class_in_use(nn.Parameter)
    compare(found, expected)


def compare(found: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            compare(one, other)
    elif isinstance(expected, torch.Tensor):
        assert not isinstance(found, OffloadedParameter)
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_two_parameters_of_one_unit_are_fetched_once() -> None:
    unit = make_unit(0, [3, 3])
    params = make_params(unit)
    expected = params[0].detach() + params[1].detach()
    pager = Fetching(flat_of(unit, params))
    pager.storage = FlatStorage(unit, params, CPU, pager)
    assert torch.equal(params[0] + params[1], expected)
    assert pager.num_faults == 1


def test_a_subclass_of_parameter_is_itself_again_in_use() -> None:
    class Scaled(nn.Parameter):
        scale = 3.0

    unit = make_unit(0, [8])
    param = Scaled(torch.randn(8))
    param.note = "kept"  # type: ignore[attr-defined]
    values = param.detach().clone()
    pager = Fetching(flat_of(unit, [param]))
    pager.storage = FlatStorage(unit, [param], CPU, pager)
    assert type(param) is OffloadedParameter
    assert torch.equal(param * 1, values)
    assert type(param) is class_in_use(Scaled)
    assert isinstance(param, Scaled) and param.scale == 3.0 and param.note == "kept"  # type: ignore[attr-defined]
    pager.storage.guard()
    assert type(param) is OffloadedParameter


def test_detach_while_a_state_dict_is_taken_gives_the_copy() -> None:
    param, pager = offloaded()
    pager.copy = torch.arange(16.0).view(4, 4)
    assert param.detach() is pager.copy
    assert pager.asked == []
