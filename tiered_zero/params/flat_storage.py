"""One flat storage a unit: emptied, refilled in place, and guarded while it is empty.

The parameters of a unit are views of `flat`. `storage.resize_(0)` gives the memory back while every view keeps its
shape, dtype and place in autograd's graphs; a later `resize_` and copy brings the bytes back under the same views.
On the CPU device the storage is a range of huge pages (hardware/huge_pages.py): it stays, its memory goes.
PyTorch itself does not notice a read of an empty storage (it crashes or returns garbage), so while a unit is away its
parameters carry the class `OffloadedParameter`, whose `__torch_function__` stands between them and every operator.
While the unit is lent they are plain `Parameter`s again and cost nothing.

[Note: Writes through .data]
`param.data.mul_()` moves no version counter. So a few elements of each parameter are compared, bit for bit, between
`expose` and `end_change`: a scaling, a clamp or a mask of the whole parameter is found, a write to single elements
perhaps not. On a GPU the result is left there until the next step looks at it (`late_change`), so that no thread waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tiered_zero.errors import ModelError, ParameterOffloadedError
from tiered_zero.hardware.huge_pages import PageRange
from tiered_zero.layout.flat import Unit
from tiered_zero.params.refusals import is_conversion


class Lender(Protocol):
    """Who answers when a parameter that is away is used."""

    def demand(self, params: Sequence[nn.Parameter], function: str) -> None:
        """Lend the units of `params`, the first of which is away, together to the running forward or backward, or raise
        ParameterOffloadedError."""

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """A CPU copy while a state_dict is being taken; else None."""

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        """A CPU copy of a parameter that is away, for a copy of its module; None while modules run."""


class ClosedEngine:
    """The lender of parameters that outlived their bytes."""

    def __init__(self, unit_name: str, own_class: type[nn.Parameter] = nn.Parameter) -> None:
        self._unit_name = unit_name
        self._own_class = own_class

    def revive(self, param: nn.Parameter, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether `func` gives the parameter a value, as load_state_dict() does: then it is plain again, with it."""
        if (
            func not in (torch.Tensor.copy_, _set_data)
            or args[0] is not param
            or isinstance(args[1], OffloadedParameter)
        ):
            return False
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            value = args[1]
            if func != _set_data:
                value = torch.empty(param.shape, dtype=param.dtype, device=param.device).copy_(value)
            param.data = value
        release_param(param, self._own_class)
        return True

    def demand(self, params: Sequence[nn.Parameter], function: str) -> None:
        raise ParameterOffloadedError(
            f"{function} needs the bytes of parameters of {self._unit_name}; they rested on a tier of an engine that "
            "is closed, and are gone. Take engine.module.state_dict() before engine.close(); module.load_state_dict() "
            "of it gives the parameters values again."
        )

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return None

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        return None


_lenders: WeakIdKeyDictionary = WeakIdKeyDictionary()


def pager_of(param: nn.Parameter) -> Lender | None:
    """Who pages this parameter, if anybody does."""
    return _lenders.get(param)  # type: ignore[no-untyped-call,no-any-return]


def release_param(param: nn.Parameter, own: type[nn.Parameter]) -> None:
    """Nobody pages the parameter any more; it is of its `own` class again."""
    param.__class__ = own
    _lenders.pop(param, None)  # type: ignore[no-untyped-call]


# What may be asked of a parameter whose bytes are elsewhere: everything that is not its bytes.
_BYTE_PROPERTIES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
_METADATA_METHODS = frozenset(
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size is_floating_point is_complex "
    "is_signed get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __len__ "
    "untyped_storage is_inference dim_order is_same_size __hash__ is_shared "
    "_has_compatible_shallow_copy_type".split()
)


_grad: Any = torch.Tensor.grad  # the descriptor
_gradient_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()


class GradientHome(Protocol):
    """Where the gradients of parameters rest between backward and step()."""

    @property
    def has_gradients(self) -> bool: ...

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """What `param.grad` is."""

    def assign(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """`param.grad = value`."""


def set_gradient_home(param: nn.Parameter, home: GradientHome | None) -> None:
    """`home` answers for `param.grad` while the parameter is of a class of ours, and autograd's attribute is empty."""
    if home is None:
        _gradient_homes.pop(param, None)  # type: ignore[no-untyped-call]
    else:
        _gradient_homes[param] = home


def _read_grad(param: nn.Parameter) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _grad.__get__(param)
    home: GradientHome | None = _gradient_homes.get(param)  # type: ignore[no-untyped-call]
    return grad if grad is not None or home is None else home.read(param)


def _assign_grad(param: nn.Parameter, value: torch.Tensor | None) -> None:
    home: GradientHome | None = _gradient_homes.get(param)  # type: ignore[no-untyped-call]
    if home is not None:
        home.assign(param, value)
        value = None
    with torch._C.DisableTorchFunctionSubclass():
        _grad.__set__(param, value)


def _delete_grad(param: nn.Parameter) -> None:
    _assign_grad(param, None)


class ResidentParameter(nn.Parameter):
    """A parameter whose bytes are on the device, between backward and step. Operators take it for a plain one; its
    `grad` is at its home."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        return nn.Parameter(data, requires_grad)  # a copy is nobody's

    grad = property(_read_grad, _assign_grad, _delete_grad)


@cache
def _resident_class(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """`own` with the `grad` of a ResidentParameter."""
    if own is nn.Parameter:
        return ResidentParameter

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return type(own.__name__, (own,), {"grad": ResidentParameter.grad, "__new__": new})


class OffloadedParameter(nn.Parameter):
    """A parameter whose bytes rest on another tier. Shape, dtype, grad and hooks work; bytes are lent or refused."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if isinstance(param := args[0] if args else None, OffloadedParameter) and _keeps(
            func, param, args[1:], keywords
        ):
            return None if func == _set_data else param
        if not _is_metadata(func):
            used = list(_parameters_in((args, keywords)))
            for index, param in enumerate(used):
                if not isinstance(param, OffloadedParameter):  # nor any more, where an earlier one's demand lent it too
                    continue
                lender: Lender = _lenders[param]
                if isinstance(lender, ClosedEngine) and lender.revive(param, func, args):
                    return param if func != _set_data else None
                if func is torch.Tensor.detach and (copy := lender.copy_of(param)) is not None:
                    return copy
                others = [p for p in used[:index] + used[index + 1 :] if pager_of(p) is lender]
                lender.demand([param, *others], _name_of(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **keywords)

    grad = ResidentParameter.grad

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else repr(self)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Parameter(away, shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"

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
        _lenders[self].demand([self], "as_subclass")
        return self.as_subclass(cls)

    def _plain_copy(self, function: str) -> nn.Parameter | None:
        """On the CPU, as state_dict() has it. None: the parameter is lent now, and of its own class."""
        lender: Lender = _lenders[self]
        if (value := lender.idle_copy(self)) is not None:
            return nn.Parameter(value, self.requires_grad)
        lender.demand([self], function)
        return None


_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _keeps(func: Callable[..., Any], param: nn.Parameter, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether `func` leaves the parameter as it is: a conversion to what it is, or `param.data = param`. That is all
    that `module.to(device)` does to a parameter that is there already."""
    if func == _set_data:
        return args[0] is param
    if not is_conversion(getattr(func, "__name__", "")) or not (args or keywords or func.__name__ != "type"):
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
    if func in (torch.autograd.grad, torch.autograd.backward):
        return True  # backward fetches what it needs
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "data") not in _BYTE_PROPERTIES
    return name in _METADATA_METHODS


def _parameters_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parameters_in(item)
    elif isinstance(value, dict):
        yield from _parameters_in(list(value.values()))


_NUM_SAMPLES = 8
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of the same size as an element: NaN differs from itself. int64 for elements of 8 bytes or more."""


def _sample_places(unit: Unit) -> torch.Tensor:
    """Words of the flat that are compared, int64: `_NUM_SAMPLES` of each parameter, in no regular pattern."""
    step = -(-unit.itemsize // 8)
    golden = (5**0.5 - 1) / 2
    places = {
        entry.start + int(entry.param.numel * (number * golden % 1))
        for entry in unit.entries
        for number in range(_NUM_SAMPLES if entry.param.numel else 0)
    }
    return torch.tensor(sorted(places), dtype=torch.int64) * step


class FlatStorage:
    """The device memory of one unit. `flat`: [P] of the unit's dtype; it has no memory or all of it, never a part.

    Driver thread.
    """

    def __init__(
        self,
        unit: Unit,
        params: Sequence[nn.Parameter],
        device: torch.device,
        lender: Lender,
        place: PageRange | None = None,
    ) -> None:
        """`place`: where the flat lies; None: the device's allocator gives it memory each time."""
        self.unit = unit
        self._place = place
        self._device = device
        self._params = tuple(params)
        self._classes = tuple(type(param) for param in params)
        self._versions = [0] * len(self._params)
        self._shows_grads = False
        self._sampled = _sample_places(unit).to(device)
        self._samples: torch.Tensor | None = None
        self._differs: torch.Tensor | None = None
        """[number of samples] bool on the device: which have changed since `late_change` was last called."""
        for param in params:
            _lenders[param] = lender
        self._take_storage()
        self.hide()

    def _take_storage(self) -> None:
        """A new one, empty, under all parameters."""
        if self._place is not None:
            self.flat = self._place.tensor.view(self.unit.dtype)
        else:
            self.flat = torch.empty(self.unit.numel, dtype=self.unit.dtype, device=self._device)
        self._bytes = self.flat.untyped_storage()
        self._words = self.flat.view(_WORDS.get(self.unit.itemsize, torch.int64))
        with torch._C.DisableTorchFunctionSubclass():
            for entry, param in zip(self.unit.entries, self._params, strict=True):
                param.data = entry.param.view(self.flat[entry.start : entry.stop])
        self._num_own_uses = torch._C._storage_Use_Count(self.key)
        if self._place is None:
            self._bytes.resize_(0)

    @property
    def is_viewed(self) -> bool:
        """Somebody beside us holds a view: a running node, an output, a custom function. Its bytes must not go."""
        return bool(torch._C._storage_Use_Count(self.key) > self._num_own_uses)

    @property
    def is_full(self) -> bool:
        return self._bytes.nbytes() != 0 if self._place is None else self._place.is_full

    def fill(self) -> None:
        """Give the flat memory; its content is undefined until a transfer has written it."""
        if self._place is not None:
            self._place.fill()
        else:
            self._bytes.resize_(self.unit.nbytes)

    def empty(self, keep: bool = True) -> None:
        """Give the memory back. Every view keeps its shape; autograd's version counters do not move. `keep`: False
        where a transfer may still write to it: no other unit gets it.

        A storage that NumPy has looked at can never be resized again; it is given up for another, with another key.
        """
        if self._place is not None:
            self._place.empty(keep)
        elif self._bytes.resizable():
            self._bytes.resize_(0)
        else:
            self._take_storage()

    def expose(self) -> None:
        """The bytes are valid: plain parameters from now on, but for their `grad` while that is shown."""
        for param, own in zip(self._params, self._classes, strict=True):
            param.__class__ = _resident_class(own) if self._shows_grads else own
        self.begin_watch()

    def begin_watch(self) -> None:
        """Parameters are unchanged from now on."""
        self._samples = None  # an interrupt leaves none of an earlier time to compare with
        self._versions = [param._version for param in self._params]
        self._samples = self._words.index_select(0, self._sampled)

    def end_change(self) -> str | None:
        """The name of a parameter that has changed since it was exposed: written to in place, or given other memory
        (`param.data = ...`), which is taken from it. [Note: Writes through .data]"""
        for entry, param, version in zip(self.unit.entries, self._params, self._versions, strict=True):
            if param._version != version or param.untyped_storage()._cdata != self.key:
                self.take_back(keep=False)
                return entry.param.name
        if self._samples is None:
            return None
        samples = self._words.index_select(0, self._sampled)
        differs, self._samples = samples != self._samples, samples
        self._differs = differs if self._differs is None else self._differs | differs
        return self.late_change() if self._device.type == "cpu" else None

    def late_change(self) -> str | None:
        """The name of a parameter whose samples `end_change` found changed. Waits for the device."""
        differs, self._differs = self._differs, None
        if differs is None or not bool(differs.any()):
            return None
        place = int(self._sampled[differs][0]) * self._words.itemsize // self.unit.itemsize
        return next(entry.param.name for entry in self.unit.entries if place < entry.stop)

    def check_converted(self) -> None:
        """Raises ModelError where a parameter that is exposed has another dtype or device than the flat, as
        `module.half()` gives to what lives on the device."""
        for entry, param in zip(self.unit.entries, self._params, strict=True):
            if param.dtype is not self.unit.dtype or param.device != self._device:
                raise ModelError(
                    f"Parameter {entry.param.name} was moved or converted: expected {self.unit.dtype} on "
                    f"{self._device}, found {param.dtype} on {param.device}. The engine keeps parameters where the "
                    "config says (bf16, fp16, tiered_zero.device): convert the model before tiered_zero.initialize()."
                )

    def take_back(self, keep: bool) -> None:
        """Parameters are views of the flat again, and unchanged from now on. `keep`: values of those that were given
        other memory are copied into it. Raises ModelError for one of another shape."""
        for entry, param in zip(self.unit.entries, self._params, strict=True):
            if param.untyped_storage()._cdata == self.key:
                continue
            if keep and param.shape != entry.param.shape:
                raise ModelError(
                    f"Parameter {entry.param.name} was given data of shape {tuple(param.shape)}; its place on the "
                    f"tiers holds {entry.param.shape}. Make a new engine for a model of another shape."
                )
            own = entry.param.view(self.flat[entry.start : entry.stop])
            if keep:
                own.copy_(param.data)
            param.data = own
        self.begin_watch()

    def hide(self) -> None:
        """The bytes are not to be used: guard every parameter."""
        for param in self._params:
            param.__class__ = OffloadedParameter

    def show_grads(self) -> None:
        """`grad` of parameters is at its home until `hide_grads`."""
        self._shows_grads = True
        for param, own in zip(self._params, self._classes, strict=True):
            if type(param) is own:
                param.__class__ = _resident_class(own)

    def hide_grads(self) -> None:
        """Parameters that are not guarded are plain."""
        if not self._shows_grads:
            return
        self._shows_grads = False
        for param, own in zip(self._params, self._classes, strict=True):
            if type(param) is not OffloadedParameter:
                param.__class__ = own

    @property
    def key(self) -> int:
        """Identity of the storage, the same for every view of it."""
        return int(self._bytes._cdata)

    def view(self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
        """The saved view with this geometry (in elements of `dtype`), on the bytes as they are now."""
        flat = self.flat if dtype == self.unit.dtype else self.flat.view(dtype)
        return flat.as_strided(size, stride, offset)

    def entry_view(self, index: int) -> torch.Tensor:
        """Parameter `index` of the unit, detached, in its own shape."""
        entry = self.unit.entries[index]
        return entry.param.view(self.flat[entry.start : entry.stop])

    def detach_params(self) -> None:
        """At the engine's end: parameters that hold bytes keep a copy of their own; the others stay guarded."""
        if not self.is_full:
            self.orphan_params()
            return
        for param, own in zip(self._params, self._classes, strict=True):
            release_param(param, own)
            param.data = param.data.clone()

    def orphan_params(self) -> None:
        """At the engine's end: parameters whose bytes ended with their tier stay guarded, and hold nothing of the
        engine's any more."""
        self.hide()
        for param, own in zip(self._params, self._classes, strict=True):
            _lenders[param] = ClosedEngine(self.unit.name, own)
