"""Handlers that a parameter of an engine calls: for its bytes, for its gradient, and to watch its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tiered_zero.layout.flat import Unit


class FaultHandler(Protocol):
    """The handler that a guarded parameter asks for its bytes: the TrainStep of its engine."""

    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        """Bring the units of `params`, the first of which is offloaded, together for the running forward or backward,
        or raise ParameterOffloadedError."""

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """Copy the parameter to the CPU while a state_dict is taken; else return None."""

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        """Copy an offloaded parameter to the CPU, for a copy of its module; return None while modules run."""

    def notice_backward(self) -> None:
        """A backward is about to need the parameter: one that the user has started past the engine begins by that."""

    def before_use(self, unit: Unit, pass_name: str) -> None:
        """A pass begins to use another unit than before, and gathers it where ranks have parts of it."""

    def watch(self, param: nn.Parameter) -> None:
        """User code is about to get the memory of a parameter in use. See [Note: Writes through .data]."""


_handlers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def handler_of(param: nn.Parameter) -> FaultHandler | None:
    """Return the handler of this parameter, ClosedEngine after its engine's end; None for a plain parameter."""
    return _handlers.get(param)  # type: ignore[no-untyped-call,no-any-return]


def require_handler(param: nn.Parameter) -> FaultHandler:
    """Return the handler of a parameter that an engine pages, or has paged."""
    handler: FaultHandler = _handlers[param]
    return handler


def set_handler(param: nn.Parameter, handler: FaultHandler) -> None:
    _handlers[param] = handler


def release_param(param: nn.Parameter, own: type[nn.Parameter]) -> None:
    """Make the parameter a plain one of its `own` class again, without a handler."""
    param.__class__ = own
    _handlers.pop(param, None)  # type: ignore[no-untyped-call]


class GradientHome(Protocol):
    """Access to the gradients of parameters between backward and step()."""

    def set_hidden(self, why: str | None) -> None:
        """Refuse to read and assign them, with the reason `why`; None allows both."""

    @property
    def has_gradients(self) -> bool: ...

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return what `param.grad` is."""

    def assign(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """Do `param.grad = value`."""


class ShownGradients(Protocol):
    """The handler that a parameter asks for its `grad`. `is_open`: no call runs, and there are gradients."""

    is_open: bool
    home: GradientHome


set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Do `param.data = ...`, past the properties of our classes."""


_gradients: WeakIdKeyDictionary = WeakIdKeyDictionary()
_grad: Any = torch.Tensor.grad  # the descriptor


def set_shown_gradients(param: nn.Parameter, gradients: ShownGradients | None) -> None:
    """Let `gradients` answer for `param.grad` where autograd's attribute has none."""
    if gradients is None:
        _gradients.pop(param, None)  # type: ignore[no-untyped-call]
    else:
        _gradients[param] = gradients


def read_grad(param: nn.Parameter, is_guarded: bool) -> torch.Tensor | None:
    """Return autograd's attribute, or the gradient at its home: at any time of a guarded parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _grad.__get__(param)
    if grad is not None:
        return grad
    gradients: ShownGradients | None = _gradients.get(param)  # type: ignore[no-untyped-call]
    return gradients.home.read(param) if gradients is not None and (is_guarded or gradients.is_open) else None


def assign_grad(param: nn.Parameter, value: torch.Tensor | None, is_guarded: bool) -> None:
    gradients: ShownGradients | None = _gradients.get(param)  # type: ignore[no-untyped-call]
    if gradients is not None and (is_guarded or gradients.is_open):
        gradients.home.assign(param, value)
        value = None
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(param, value)
