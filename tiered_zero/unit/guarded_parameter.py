"""The class of a parameter whose unit is not in use: it answers what needs no bytes; the rest it fetches or refuses.

PyTorch itself does not notice a read of an empty storage (it crashes or returns garbage), so while a unit is not in use
its parameters carry the class `OffloadedParameter`, whose `__torch_function__` stands between them and every operator;
where C++ code reads them past that, a dispatch key does (unit/dispatch_key.py).
While the unit is in use they are plain `Parameter`s again and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiered_zero.errors import ParameterOffloadedError
from tiered_zero.layout.flat import Unit
from tiered_zero.unit import dispatch_key
from tiered_zero.unit.dispatch_key import without_key
from tiered_zero.unit.param_handlers import (
    assign_grad,
    handler_of,
    read_grad,
    release_param,
    require_handler,
    set_data,
)
from tiered_zero.unit.param_in_use import WATCHED, as_part


class ClosedEngine:
    """The handler of parameters whose engine is closed, and whose bytes ended with its tiers."""

    def __init__(self, unit_name: str, own_class: type[nn.Parameter] = nn.Parameter) -> None:
        self._unit_name = unit_name
        self._own_class = own_class

    def revive(self, param: nn.Parameter, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether `func` gives the parameter a value, as load_state_dict() does: then it is plain again, with it."""
        if func not in (torch.Tensor.copy_, set_data) or args[0] is not param:
            return False
        if isinstance(value := args[1], OffloadedParameter):
            return False
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if func != set_data:
                value = torch.empty(param.shape, dtype=param.dtype, device=param.device).copy_(value)
            set_data(param, value)
        release_param(param, self._own_class)
        return True

    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        raise ParameterOffloadedError(
            f"{function} needs the bytes of parameters of {self._unit_name}; they rested on a tier of an engine that "
            "is closed, and are gone. Take engine.module.state_dict() before engine.close(), and load it with "
            "model.load_state_dict(); or build the model anew."
        )

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return None

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        return None

    def notice_backward(self) -> None:
        """`fault_in` refuses what it needs."""

    def before_use(self, unit: Unit, pass_name: str) -> None:
        """`fault_in` refuses it."""

    def watch(self, param: nn.Parameter) -> None:
        """Nothing comes of a change."""


_CONVERSIONS = frozenset("to cpu cuda type float double half bfloat16".split())
"""Functions that return the tensor itself if it is as wanted, which `module.to()` relies on."""
# What may be asked of an offloaded parameter: everything but its bytes.
_BYTE_PROPERTIES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
_GIVES_MEMORY = frozenset({".data", "detach", *WATCHED})
_METADATA_METHODS = frozenset(
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size is_floating_point is_complex "
    "is_signed get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __len__ "
    "is_inference dim_order is_same_size __hash__ is_shared "
    "_has_compatible_shallow_copy_type empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_empty_strided new_zeros new_ones new_full".split()
)


def offloaded_error(
    function: str, param: str, tier: str, dtype: torch.dtype, device: torch.device
) -> ParameterOffloadedError:
    """`param`, by name, rests on `tier`; it is of `dtype` on `device` wherever it is used."""
    if function in _CONVERSIONS:
        return ParameterOffloadedError(
            f"{function} cannot move or convert parameter {param!r}: it is {dtype} on {device} wherever it is used, "
            f"and rests on tier {tier} between uses. Leave out module.to(...), .cpu(), .half() and the like: set the "
            "precision in the config (bf16, fp16), and read values inside `with tiered_zero.gathered(param):`, or from "
            "engine.module.state_dict()."
        )
    return ParameterOffloadedError(
        f"{function} needs the bytes of parameter {param!r}, which rest on tier {tier} between uses. Read it inside "
        "`with tiered_zero.gathered(param):` (modify=True to change it), or use it in the forward of a module, which "
        "is called as module(...); engine.module.state_dict() has a copy."
    )


class OffloadedParameter(nn.Parameter):
    """A parameter whose unit is not in use. Shape, dtype, grad and hooks work; bytes are fetched or refused.

    An entry point of [Note: Entry points]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, OffloadedParameter) and _keeps(func, first, args[1:], keywords):
            return None if func == set_data else first
        if _is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass(), without_key():
                return func(*args, **keywords)
        if func not in (torch.autograd.grad, torch.autograd.backward):  # backward fetches what it needs
            for param, used in _offloaded_in((args, keywords)):
                handler = require_handler(param)
                if isinstance(handler, ClosedEngine) and handler.revive(param, func, args):
                    return param if func != set_data else None
                if func is torch.Tensor.detach and (copy := handler.copy_of(param)) is not None:
                    return copy
                _fault_in(param, used, _name_of(func))
                if param is first and _name_of(func) in _GIVES_MEMORY:
                    handler.watch(param)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **keywords)
        return as_part(found) if func is torch.Tensor.__getitem__ else found

    grad = property(
        lambda param: read_grad(param, True),
        lambda param, value: assign_grad(param, value, True),
        lambda param: assign_grad(param, None, True),
    )

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else repr(self)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"Parameter(offloaded, shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if (copy := self._plain_copy("deepcopy")) is not None:
            memo[id(self)] = copy  # a second name of a tied parameter finds it
            return copy
        return self.__deepcopy__(memo)  # of its own class, which it has again

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (copy := self._plain_copy("pickle")) is not None:
            return copy.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return self.__reduce_ex__(protocol)

    def as_subclass(self, cls: type[Any]) -> Any:
        """torch does not dispatch here."""
        require_handler(self).fault_in([self], "as_subclass")
        return self.as_subclass(cls)

    def _plain_copy(self, function: str) -> nn.Parameter | None:
        """Copy the parameter to the CPU, as state_dict() does. None: it is in use now, and of its own class."""
        handler = require_handler(self)
        if (value := handler.idle_copy(self)) is not None:
            return nn.Parameter(value, self.requires_grad)
        handler.fault_in([self], function)
        return None


def _keeps(func: Callable[..., Any], param: nn.Parameter, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether `func` leaves the parameter as it is: a conversion to what it is, or `param.data = param`. That is all
    that `module.to(device)` does to a parameter that is there already."""
    if func == set_data:
        return args[0] is param
    if getattr(func, "__name__", "") not in _CONVERSIONS or not (args or keywords or func.__name__ != "type"):
        return False
    if any(isinstance(value, torch.memory_format) for value in (*args, *keywords.values())):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty(0, dtype=param.dtype, device=param.device)
        return func(probe, *args, **keywords) is probe


def _name_of(func: Any) -> str:
    """As the user wrote it: `mul`, or `.data` for the getter of an attribute."""
    name = getattr(func, "__name__", str(func))
    return f".{getattr(func.__self__, '__name__', name)}" if name in ("__get__", "__set__") else name


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "data") not in _BYTE_PROPERTIES
    return name in _METADATA_METHODS


def _fault_in(param: nn.Parameter, used: Sequence[nn.Parameter], function: str) -> None:
    """Fetch `param`, together with those that are `used` with it."""
    handler = require_handler(param)
    handler.fault_in([param, *(other for other in used if handler_of(other) is handler)], function)


def _offloaded_in(values: Any) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
    """Each parameter among the arguments that is offloaded when its turn comes (an earlier one's fault may have fetched
    it too), and the others."""
    used = list(_parameters_in(values))
    for index, param in enumerate(used):
        if isinstance(param, OffloadedParameter):
            yield param, used[:index] + used[index + 1 :]


def _fetch_for_operator(operator: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """For operators that C++ code calls. Whether the operator needs bytes; then they are there."""
    name = operator.overloadpacket.__name__
    if name in _METADATA_METHODS:
        return False
    found = False
    for param, used in _offloaded_in((args, keywords)):
        found = True
        _fault_in(param, used, name)
    if not found:  # but a tensor that C++ code has made of a parameter's memory
        raise ParameterOffloadedError(
            f"{name} needs the bytes of a parameter that is offloaded. Read it inside "
            "`with tiered_zero.gathered(param):`, or from engine.module.state_dict(). If this is a backward: hooks for "
            "saved tensors (torch.autograd.graph), set in a module's forward, have kept the parameter itself; let them "
            "keep a copy."
        )
    return True


dispatch_key.register(_fetch_for_operator)


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parameters_in(item)
    elif isinstance(value, dict):
        yield from _parameters_in(list(value.values()))
