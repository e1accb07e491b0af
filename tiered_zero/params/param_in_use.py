"""The class of a parameter whose bytes are on the device.

Operators treat it as a plain parameter, and copies of it are plain ones. Its `grad` is at the gradient's home between
backward and step(). `data`, and what leads to a NumPy array or an address, let user code write past the version
counter: the engine watches the parameter's values from there on. See [Note: Writes through .data].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from tiered_zero.params.param_handlers import assign_grad, handler_of, read_grad, set_data

_DATA: Any = torch.Tensor.data  # the descriptor
WATCHED = ("numpy", "__array__", "data_ptr", "__dlpack__")
"""Methods by which memory is written past the version counter, besides `data` and `detach`."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read_data(param: nn.Parameter) -> torch.Tensor:
    if (handler := handler_of(param)) is not None:
        handler.watch(param)
    data: torch.Tensor = _DATA.__get__(param)
    return data


def detach(param: nn.Parameter) -> torch.Tensor:
    """As torch's, which shares the version counter; but NumPy, which moves none, takes what is detached."""
    if not torch.compiler.is_compiling() and (handler := handler_of(param)) is not None:
        if (copy := handler.copy_of(param)) is not None:
            return copy
        if param.device.type == "cpu":
            handler.watch(param)
    return torch.Tensor.detach(param)


def _watched(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def call(param: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        if (handler := handler_of(param)) is not None:
            handler.watch(param)
        return method(param, *args, **kwargs)

    call.__name__ = name
    return call


def _as_own(own: type[nn.Parameter], name: str) -> Callable[..., Any]:
    """A method that copies or pickles, which asks for its object's class."""

    def call(param: nn.Parameter, *args: Any) -> Any:
        in_use = type(param)
        param.__class__ = own
        try:
            return getattr(param, name)(*args)
        finally:
            param.__class__ = in_use

    return call


@cache
def class_in_use(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that parameters of class `own` have while they are in use."""

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)  # a copy has no handler

    members: dict[str, Any] = {name: _watched(name) for name in WATCHED}
    members |= {name: _as_own(own, name) for name in ("__deepcopy__", "__reduce_ex__")}
    members |= {
        "__new__": new,
        "__module__": own.__module__,
        "grad": property(
            lambda param: read_grad(param, False),
            lambda param, value: assign_grad(param, value, False),
            lambda param: assign_grad(param, None, False),
        ),
        "data": property(_read_data, set_data),
        "detach": detach,
    }
    return type(own.__name__, (own,), members)
