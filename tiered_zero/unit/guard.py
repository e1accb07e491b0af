"""Guard parameters: each has the class `OffloadedParameter` while its unit is not in use, and a "class in use"
otherwise.

PyTorch does not notice a read of an empty storage: it crashes or returns garbage. So `__torch_function__` of an
`OffloadedParameter` runs the functions that need no bytes; for all others it fetches the unit or raises.

[Note: The key of offloaded parameters] `torch.tensor(param)`, `Tensor.set_`, TorchScript and others take a tensor
without calling `__torch_function__`, but each of them calls an operator. So an offloaded parameter carries a dispatch
key for which torch has no kernels (a key for torch's own tests). The kernel registered here for this key fetches the
bytes, or raises. DLPack calls no operator but takes the address. So the storage of an offloaded parameter is marked,
and torch raises if code asks for its address. `param.data = keyed` gives a parameter the key and the marked storage;
`param.data = plain` takes both away. Each assignment takes 0.3 us, and keeps hooks and version counter.

While a unit is in use, its parameters behave as plain ones, and copies of them are plain. `grad` reads the gradient's
home between backward and step(). `data` is `detach()`, which shares the version counter. Once user code gets a NumPy
array or an address, the engine watches the parameter's values: [Note: Writes through .data]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tiered_zero.errors import ParameterOffloadedError

# -- handlers ----------------------------------------------------------------------------------------------------------

_get_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Do `param.data = ...` without calling the `data` properties of the classes in this file."""


class FaultHandler(Protocol):
    """The handler that a guarded parameter asks for its bytes: the Pager of its engine, or a ClosedEngine."""

    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        """Fetch the units of `params` for the running forward or backward, or raise ParameterOffloadedError. `params`:
        arguments of `function`; the first is offloaded."""

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the parameter on the CPU while a state_dict is taken; else return None."""

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a CPU copy of an offloaded parameter, to copy or pickle its module. Return None while modules or a
        backward run, and after the engine is closed."""

    def watch(self, param: nn.Parameter) -> None:
        """Copy the values of a parameter in use before user code gets its memory. [Note: Writes through .data]"""


_handlers: WeakIdKeyDictionary = WeakIdKeyDictionary()


def handler_of(param: nn.Parameter) -> FaultHandler | None:
    """Return the parameter's handler: a Pager, or a ClosedEngine; None for a plain parameter."""
    return _handlers.get(param)  # type: ignore[no-untyped-call,no-any-return]


def require_handler(param: nn.Parameter) -> FaultHandler:
    """Return the parameter's handler. Raises KeyError for a plain parameter."""
    handler: FaultHandler = _handlers[param]
    return handler


def set_handler(param: nn.Parameter, handler: FaultHandler) -> None:
    _handlers[param] = handler


def release_param(param: nn.Parameter, own: type[nn.Parameter]) -> None:
    """Make the parameter plain again: set its class to `own`, and remove its handler."""
    param.__class__ = own
    _handlers.pop(param, None)  # type: ignore[no-untyped-call]


class ClosedEngine:
    """The handler of parameters whose engine is closed: their bytes are gone."""

    def __init__(self, unit_name: str, own_class: type[nn.Parameter] = nn.Parameter) -> None:
        self._unit_name = unit_name
        self._own_class = own_class

    def revive(self, param: nn.Parameter, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Make the parameter plain if `func(*args)` assigns it a value, as load_state_dict() does. It then has this
        value. Return whether `func(*args)` assigns a value."""
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

    def watch(self, param: nn.Parameter) -> None:
        """Do nothing: a parameter without an engine may be changed."""


# -- param.grad between backward and step() ----------------------------------------------------------------------------


class GradientHome(Protocol):
    """Interface of the GradientStore, which holds gradients between backward and step(). `is_shown`: whether
    `param.grad` of a parameter in use reads and assigns these gradients; `param.grad` of a guarded parameter always
    does."""

    is_shown: bool

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the value of `param.grad`."""

    def assign(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """Do `param.grad = value`."""


_gradients: WeakIdKeyDictionary = WeakIdKeyDictionary()
_grad: Any = torch.Tensor.grad  # the descriptor


def set_gradient_home(params: Iterable[nn.Parameter], home: GradientHome | None) -> None:
    """Make `param.grad` of `params` read and assign the gradients in `home`. With None, `param.grad` is autograd's own
    attribute again."""
    for param in params:
        if home is not None:
            _gradients[param] = home
        else:
            _gradients.pop(param, None)  # type: ignore[no-untyped-call]


def read_grad(param: nn.Parameter, is_guarded: bool) -> torch.Tensor | None:
    """Return `param.grad`: autograd's attribute if it is set, else the gradient at its home. If the parameter is not
    guarded, the home is read only while `GradientHome.is_shown`."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _grad.__get__(param)
    if grad is not None:
        return grad
    home: GradientHome | None = _gradients.get(param)  # type: ignore[no-untyped-call]
    return home.read(param) if home is not None and (is_guarded or home.is_shown) else None


def assign_grad(param: nn.Parameter, value: torch.Tensor | None, is_guarded: bool) -> None:
    home: GradientHome | None = _gradients.get(param)  # type: ignore[no-untyped-call]
    if home is not None and (is_guarded or home.is_shown):
        home.assign(param, value)
        value = None
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(param, value)


# -- parameters in use -------------------------------------------------------------------------------------------------

WATCHED = ("numpy", "__array__", "data_ptr", "__dlpack__")
"""Methods that give user code a tensor's memory. Writes to this memory do not change the tensor's version counter."""


def _watch(tensor: torch.Tensor) -> None:
    """Let the pager copy the values of a parameter, to find later whether user code has changed them. `tensor`: the
    parameter, or a view of it."""
    param = tensor if isinstance(tensor, nn.Parameter) else tensor._base
    if isinstance(param, nn.Parameter) and (handler := handler_of(param)) is not None:
        handler.watch(param)


def _index(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Index a parameter in use, or a part of one. A view gets the class `_PartInUse`, so that writes through it are
    found."""
    found = torch.Tensor.__getitem__(tensor, index)
    if not torch.compiler.is_compiling() and type(found) is torch.Tensor:
        with torch._C.DisableTorchFunction():  # so that the user's modes see the same calls as in plain PyTorch
            is_view = found._is_view()
        if is_view:
            found.__class__ = _PartInUse
    return found


def _detach(param: nn.Parameter) -> torch.Tensor:
    """Return `param.detach()` for a parameter in use. While a state_dict is taken, return a copy on the CPU instead."""
    if not torch.compiler.is_compiling() and (handler := handler_of(param)) is not None:
        if (copy := handler.copy_of(param)) is not None:
            return copy
        if param.device.type == "cpu":  # NumPy accepts a detached tensor, and moves no counter
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
    """Wrap torch's method `name`, which copies, pickles or prints a tensor, so that the tensor has the class `own`
    while the method runs."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        in_use = type(tensor)
        tensor.__class__ = own
        try:
            return getattr(tensor, name)(*args, **kwargs)
        finally:
            tensor.__class__ = in_use

    return call


def _members(own: type[torch.Tensor]) -> dict[str, Any]:
    """Return the methods and properties of a subclass of `own`. They notice when user code gets the tensor's memory.
    They copy, pickle and print the tensor as an object of class `own`."""
    members: dict[str, Any] = {name: _watched(name) for name in WATCHED}
    members |= {name: _as_own(own, name) for name in ("__deepcopy__", "__reduce_ex__", "__format__", "__repr__")}
    members |= {"__getitem__": _index, "__module__": own.__module__}
    detach = _detach if issubclass(own, nn.Parameter) else _watched("detach")
    return members | {"detach": detach, "data": property(detach, set_data)}


_PartInUse = type(
    "Tensor",
    (torch.Tensor,),
    {
        **_members(torch.Tensor),
        "__torch_function__": torch._C._disabled_torch_function_impl,
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
    }
    return type(own.__name__, (own,), members)


# -- [Note: The key of offloaded parameters] ---------------------------------------------------------------------------

_NAME = "TESTING_ONLY_GenericWrapper"
_key: Any = torch._C._parse_dispatch_key(_NAME)
_KEYS = torch._C.DispatchKeySet(_key)
_WRAPPER_KEYS = (
    _KEYS
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
)
_libraries: list[torch.library.Library] = []
"""Keeps the kernels of `_register_kernel` registered: torch drops them when these objects are collected."""


class _Keyed(torch.Tensor):
    """The class of the temporary tensor that gives a parameter more dispatch keys. torch accepts such keys only for a
    class with `__torch_dispatch__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} of a tensor that lends its keys alone")


def keyed(plain: torch.Tensor) -> torch.Tensor:
    """Return a tensor to assign to `param.data`. It has the storage of `plain` and the dispatch key of offloaded
    parameters. From now on torch raises RuntimeError if code asks for the address of this storage."""
    size, stride, offset = plain.size(), plain.stride(), plain.storage_offset()
    with torch.inference_mode(False):
        wrapper: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            _Keyed, size, stride, offset, dtype=plain.dtype, device=plain.device, _extra_dispatch_keys=_KEYS
        )
        with torch._C._ExcludeDispatchKeyGuard(_WRAPPER_KEYS):
            wrapper.set_(plain.untyped_storage(), offset, size, stride)
        found = torch.empty(0, dtype=plain.dtype, device=plain.device)
        found.data = wrapper  # takes over all keys except those of Python, at which inference mode would look
    torch._C._set_throw_on_mutable_data_ptr(found)
    return found


@final
class without_key(torch._C._ExcludeDispatchKeyGuard):
    """A context in which operators on offloaded parameters run torch's own kernels. Only for calls that do not read the
    parameters' bytes."""

    def __init__(self) -> None:
        super().__init__(_KEYS)


# -- offloaded parameters ----------------------------------------------------------------------------------------------

_CONVERSIONS = frozenset("to cpu cuda type float double half bfloat16".split())
"""Names of functions that return the tensor itself if it has the wanted dtype and device. So `module.to()` can leave an
offloaded parameter as it is."""
# An offloaded parameter answers everything that does not need its bytes.
_BYTE_PROPERTIES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
_OF_CLASS_IN_USE = frozenset({"detach", "__getitem__", *WATCHED})
"""Names of methods that the class of a parameter in use overrides. If user code calls one on an offloaded parameter,
the parameter is fetched, then the override runs, not torch's method."""
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
    """Return the error for a call of `function` that would read or convert the offloaded parameter named `param`.
    `tier`: the tier of its home. `dtype`, `device`: the parameter's dtype and device while it is in use."""
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
    """A parameter whose unit is not in use. Shape, dtype, grad and hooks work; a function that needs the bytes fetches
    them, or raises. [Note: Entry points]"""

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
        if isinstance(first, nn.Parameter) and not isinstance(first, OffloadedParameter):  # it is in use now
            if func == _get_data:
                return first.data
            if getattr(func, "__name__", "") in _OF_CLASS_IN_USE:
                return getattr(first, func.__name__)(*args[1:], **keywords)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **keywords)

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
        return self.__deepcopy__(memo)  # now that of its class in use

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (copy := self._plain_copy("pickle")) is not None:
            return copy.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return self.__reduce_ex__(protocol)

    def as_subclass(self, cls: type[Any]) -> Any:
        """Fetch the parameter's bytes, then call torch's method. Needed because torch does not call
        `__torch_function__` for `as_subclass`."""
        require_handler(self).fault_in([self], "as_subclass")
        return self.as_subclass(cls)

    def _plain_copy(self, function: str) -> nn.Parameter | None:
        """Return a copy of the parameter on the CPU. While modules or a backward run, fetch the parameter instead and
        return None. A fetched parameter has its own class again, so the caller copies it with the method of that
        class."""
        handler = require_handler(self)
        if (value := handler.idle_copy(self)) is not None:
            return nn.Parameter(value, self.requires_grad)
        handler.fault_in([self], function)
        return None


def _keeps(func: Callable[..., Any], param: nn.Parameter, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether `func` leaves the parameter as it is: `param.data = param`, or a conversion to its own dtype and
    device."""
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
    """Return the function's name as the user wrote it: `mul`, or `.data` for reading or setting an attribute."""
    name = getattr(func, "__name__", str(func))
    return f".{getattr(func.__self__, '__name__', name)}" if name in ("__get__", "__set__") else name


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "data") not in _BYTE_PROPERTIES
    return name in _METADATA_METHODS


def _fault_in(param: nn.Parameter, used: Sequence[nn.Parameter], function: str) -> None:
    """Fetch the unit of `param`, and the units of parameters in `used` that have the same engine. `function`: the name
    of the function that gets these parameters, for errors."""
    handler = require_handler(param)
    handler.fault_in([param, *(other for other in used if handler_of(other) is handler)], function)


def _offloaded_in(values: Any) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
    """Yield (parameter, others) for each offloaded parameter in `values`, the arguments of a call. `others`: all other
    parameters in `values`. A parameter that the caller has fetched in the meantime is skipped."""
    used = list(_parameters_in(values))
    for index, param in enumerate(used):
        if isinstance(param, OffloadedParameter):
            yield param, used[:index] + used[index + 1 :]


def _fetch_for_operator(operator: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Fetch the offloaded parameters among the arguments of `operator`, which C++ code has called. Return False, and
    fetch none, if the operator reads only metadata. Raises ParameterOffloadedError if no argument is an offloaded
    parameter. An argument is then a tensor that C++ code has made from a parameter's memory."""
    name = operator.overloadpacket.__name__
    if name in _METADATA_METHODS:
        return False
    found = False
    for param, used in _offloaded_in((args, keywords)):
        found = True
        _fault_in(param, used, name)
    if not found:  # C++ code has made a tensor of a parameter's memory
        raise ParameterOffloadedError(
            f"{name} needs the bytes of a parameter that is offloaded. Read it inside "
            "`with tiered_zero.gathered(param):`, or from engine.module.state_dict(). If this is a backward: hooks for "
            "saved tensors (torch.autograd.graph), set in a module's forward, have kept the parameter itself; let them "
            "keep a copy."
        )
    return True


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parameters_in(item)
    elif isinstance(value, dict):
        yield from _parameters_in(list(value.values()))


def _register_kernel() -> None:
    """Register a kernel that runs before operators on offloaded parameters. It fetches the parameters' bytes, or
    raises."""

    def kernel(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _fetch_for_operator(operator, args, kwargs):
            return operator(*args, **kwargs)
        with without_key():
            return operator(*args, **kwargs)

    library: Any = torch.library.Library
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    everything.fallback(kernel, _NAME)
    # which `param.data = ...` calls
    aten.impl("_has_compatible_shallow_copy_type", torch.library.fallthrough_kernel, _NAME)
    _libraries.extend((everything, aten))


_register_kernel()
