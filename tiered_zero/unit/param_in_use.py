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

from tiered_zero.unit.param_handlers import assign_grad, handler_of, read_grad, set_data

_DATA: Any = torch.Tensor.data  # the descriptor
WATCHED = ("numpy", "__array__", "data_ptr", "__dlpack__")
"""Methods by which memory is written past the version counter, besides `data` and `detach`."""


def _watch(tensor: torch.Tensor) -> None:
    """Let the engine of a parameter, or of the one that `tensor` is a part of, watch its values."""
    param = tensor if isinstance(tensor, nn.Parameter) else tensor._base
    if isinstance(param, nn.Parameter) and (handler := handler_of(param)) is not None:
        handler.watch(param)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read_data(tensor: torch.Tensor) -> torch.Tensor:
    _watch(tensor)
    data: torch.Tensor = _DATA.__get__(tensor)
    return data


def as_part(found: torch.Tensor) -> torch.Tensor:
    """Give what indexing a parameter in use has found the class of its parts, if it is a view."""
    if type(found) is torch.Tensor:
        with torch._C.DisableTorchFunction():  # a mode of the user sees what it sees in plain PyTorch
            is_view = found._is_view()
        if is_view:
            found.__class__ = _PartInUse
    return found


def _index(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    found = torch.Tensor.__getitem__(tensor, index)
    return found if torch.compiler.is_compiling() else as_part(found)


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

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _watch(tensor)
        return method(tensor, *args, **kwargs)

    call.__name__ = name
    return call


def _as_own(own: type[torch.Tensor], name: str) -> Callable[..., Any]:
    """A method that copies, pickles or prints, which asks for its object's class."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        in_use = type(tensor)
        tensor.__class__ = own
        try:
            return getattr(tensor, name)(*args, **kwargs)
        finally:
            tensor.__class__ = in_use

    return call


def _members(own: type[torch.Tensor]) -> dict[str, Any]:
    """What a parameter in use and its parts do otherwise than tensors of class `own`."""
    members: dict[str, Any] = {name: _watched(name) for name in WATCHED}
    members |= {name: _as_own(own, name) for name in ("__deepcopy__", "__reduce_ex__", "__format__", "__repr__")}
    return members | {"data": property(_read_data, set_data), "__getitem__": _index, "__module__": own.__module__}


_PartInUse = type(
    "Tensor",
    (torch.Tensor,),
    {
        **_members(torch.Tensor),
        "__torch_function__": torch._C._disabled_torch_function_impl,
        "detach": _watched("detach"),
    },
)


@cache
def class_in_use(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that parameters of class `own` have while they are in use."""

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)  # a copy has no handler

    members = {
        **_members(own),
        "__new__": new,
        "grad": property(
            lambda param: read_grad(param, False),
            lambda param, value: assign_grad(param, value, False),
            lambda param: assign_grad(param, None, False),
        ),
        "detach": detach,
    }
    return type(own.__name__, (own,), members)
