"""Save a unit's views for backward by name (which unit, which version) instead of by address.

[Note: Versions of saved tensors] Under saved-tensor hooks autograd compares no version counters. So `pack` records the
version counter of every tensor, and `unpack` raises torch's error if the counter has changed. A tensor that has a graph
is saved detached, because a node that holds its own output would keep itself alive for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.layout.flat import Unit
from tiered_zero.unit.guard import ClosedEngine
from tiered_zero.unit.unit import FlatStorage, UnitState, UnitTable

_NO_TRANSFORM = (
    "torch.func.grad, vjp, jacrev and hessian do not support saved tensor hooks, by which paged parameters are saved "
    "for backward, so they cannot run over a module of the engine, nor inside its forward. Use torch.autograd.grad "
    "(with create_graph=True where the result is differentiated again), or torch.func.jvp."
)


@dataclass(frozen=True, kw_only=True)
class SavedView:
    """The object that autograd keeps instead of a view of a flat: the unit, and the view's geometry in elements of
    `dtype`. `version`: the unit's version. `counter`: the parameter's version counter. Both are None inside of
    torch.utils.checkpoint, which recomputes with current weights."""

    unit: Unit
    version: int | None
    counter: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class SavedWrapper:
    """The object that autograd keeps if a torch.func transform has wrapped a view of a flat. `wrapper`: the transform's
    tensor; it cannot be created again. `view`: the view in the wrapper; while it exists, the unit keeps its memory.
    `inner`: the `SavedView` of the view."""

    wrapper: torch.Tensor
    view: torch.Tensor
    inner: SavedView


SavedTensor = tuple[torch.Tensor, int]
"""A saved tensor that is no view of a flat, and its version counter when it was saved. See [Note: Versions of saved
tensors]."""


class MovedTensor(Protocol):
    """A saved tensor that a `TensorMover` moves off the device. `counter`: a tensor with the same version counter as
    the saved one. `version`: the counter's value when the tensor was saved."""

    counter: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """Return the saved tensor on the device; move its bytes back if they have left."""


class TensorMover(Protocol):
    """Interface of the object that moves saved tensors off the device, except views of a unit."""

    def pack(self, tensor: torch.Tensor, version: int) -> MovedTensor | None:
        """Begin to move a saved tensor; return None if it stays on the device. `version`: the tensor's version
        counter."""


@dataclass(frozen=True, kw_only=True)
class SavedByProgram:
    """The object that autograd keeps for a tensor that the program's own hooks have saved. `packed`: the result of
    their pack hook."""

    packed: Any
    unpack: Callable[[Any], Any]


Saved = SavedTensor | SavedView | SavedWrapper | SavedByProgram | MovedTensor
Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], Any]


@final
class SavedViews:
    """The saved-tensor hooks of one engine. Autograd calls `pack` on forward's thread, and `unpack` on backward's."""

    def __init__(
        self,
        units: UnitTable,
        fault_in_saved: Callable[[Unit, int | None], FlatStorage],
        mover: TensorMover | None = None,
    ) -> None:
        """`fault_in_saved(unit, version)`: fetches a unit for the running backward and returns its storage. `mover`:
        gets saved tensors that are not views of a unit, unless other saved-tensor hooks are set. None: these tensors
        stay on the device."""
        self._units = units
        self._fault_in_saved = fault_in_saved
        self._mover = mover

    def close(self) -> None:
        """Drop every reference to the engine. Keep only resident units, which a graph that outlives the engine may
        need."""
        # Autograd's nodes refer to this object, unseen by Python's garbage collector. A failed engine holds its error,
        # and the error's traceback the graph: with a reference to the engine, this circle would never be freed.
        self._fault_in_saved = _ClosedUnits(self._units)
        self._units, self._mover = UnitTable(), None

    # -- the outermost forward, or a backward --------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context manager. Inside it, autograd saves views of flats by name instead of by address."""
        refuse_tracing()
        saving = self.begin()
        try:
            yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error) and not isinstance(error, TieredZeroError):
                raise ModelError(_NO_TRANSFORM) from error
            raise
        finally:
            if saving is not None:
                saving.__exit__()

    def begin(self) -> saved_tensors_hooks | None:
        """Set the hooks that save a view of a flat as unit and position. Return the hooks for `end`. Do nothing and
        return None if the innermost hooks are this object's or those of torch.utils.checkpoint. Raises ModelError if
        user code has moved or converted the model (`module.half()`), or if a torch.func transform forbids hooks."""
        self._check_converted()
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            raise ModelError(_NO_TRANSFORM)
        if (hooks := self.hooks_inside(torch._C._autograd._top_saved_tensors_default_hooks(True))) is None:
            return None
        saving = saved_tensors_hooks(*hooks)
        saving.__enter__()
        return saving

    @runs_outside_modes
    def _check_converted(self) -> None:
        for paged in self._units.by_unit.values():
            if paged.is_resident and paged.state is UnitState.IN_USE:
                paged.storage.check_converted()

    def end(self, saving: saved_tensors_hooks | None) -> None:
        """Remove the hooks that `begin` has returned, unless `abort` has removed them already."""
        if saving is not None and self._is_saving():
            saving.__exit__()

    def abort(self) -> None:
        """Remove the hooks that an interrupted forward has left on autograd's stack. No forward may run."""
        while self._is_saving():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _is_saving(self) -> bool:
        """Return whether the innermost hooks for saved tensors on this thread belong to this object."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and self.is_own(top[0])

    # -- pack and unpack -----------------------------------------------------------------------------------------------

    @runs_outside_modes
    def pack(self, tensor: torch.Tensor) -> SavedTensor | SavedView | SavedWrapper:
        """Return what autograd saves for `tensor`: unit and position if it is a view of a unit's flat; else the tensor
        and its version."""
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                key = inner.untyped_storage()._cdata
            except NotImplementedError:  # sparse tensors have none
                key = 0
            paged = self._units.by_storage.get(key)
            if paged is None:
                keeps_no_node = tensor.is_leaf or inner is not tensor  # a transform's wrapper cannot be made anew
                return tensor if keeps_no_node else tensor.detach(), tensor._version
            size, stride, offset = tuple(inner.size()), inner.stride(), int(inner.storage_offset())
            saved = SavedView(
                unit=paged.unit,
                version=paged.version,
                counter=paged.storage.param_at(offset * inner.itemsize)._version,
                size=size,
                stride=stride,
                offset=offset,
                dtype=inner.dtype,
            )
            return saved if inner is tensor else SavedWrapper(wrapper=tensor, view=inner.detach(), inner=saved)

    @runs_outside_modes
    def pack_and_move(self, tensor: torch.Tensor) -> Saved:
        """Save a view of a unit's flat by name, and pass any other tensor to the mover."""
        saved = self.pack(tensor)
        if self._mover is None or not isinstance(saved, tuple):
            return saved
        with torch._C.DisableTorchFunctionSubclass():
            return self._mover.pack(*saved) or saved

    # torch 2.14 gives the program's hooks what a selective checkpoint keeps, or warns of it. These hooks are not the
    # program's: what they would get does not share the kept tensor's version counter, so a change in place went unseen.
    vars(pack).update(_checkpoint_internal=True, _user_hooks=None)
    vars(pack_and_move).update(_checkpoint_internal=True, _user_hooks=None)

    def hooks_inside(self, outer: tuple[Pack, Unpack] | None) -> tuple[Pack, Unpack] | None:
        """Return the (pack, unpack) hooks to set inside `outer`, the innermost hooks (None: there are none). Return
        None (no hooks to set) if `outer` belongs to this object or to torch.utils.checkpoint."""
        if outer is None:
            return (self.pack if self._mover is None else self.pack_and_move), self.unpack
        # a checkpoint counts all saved tensors, and recomputes without the engine's call around it
        if self.is_own(outer[0]) or _is_of_checkpoint(outer[0]):
            return None
        return _PackInside(self, outer), self.unpack

    def is_own(self, pack: Pack) -> bool:
        return pack in (self.pack, self.pack_and_move) or (isinstance(pack, _PackInside) and pack.views is self)

    def begin_module(self) -> bool:
        """Set this object's saved-tensor hooks when a module begins, if a backward recomputes the module or the
        innermost hooks belong to other code. Return whether the caller must call `end_inside`."""
        # The program's hooks alone would hold the unit's memory, and a checkpoint would hold recomputed weights until
        # its backward ends. A checkpoint counts saved tensors: a module must save alike in forward and recomputation.
        top: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None:
            self.save_recomputed()
        elif not self.is_own(top[0]) and self._may_save():
            torch._C._autograd._push_saved_tensors_default_hooks(_PackInside(self, top), self.unpack)
            return True
        return False

    def end_inside(self) -> None:
        if self._is_saving():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def save_recomputed(self) -> None:
        """Set this object's saved-tensor hooks, if a backward recomputes a forward and no hooks are set. The hooks stay
        set until the running node of the backward has ended."""
        # as in a backward without the engine: autograd would save parameters, whose bytes are gone after eviction
        if torch._C._current_graph_task_id() == -1 or not self._may_save():
            return
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def _may_save(self) -> bool:
        enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        return enabled and torch.is_grad_enabled()

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Return the tensor that forward saved; fetch it if it is offloaded. Raises RuntimeError if the tensor was
        changed in place after forward saved it, and ModelError if a step or `gathered` has changed the weights. [Note:
        Entry points]"""
        if isinstance(saved, tuple):
            tensor, expected = saved
            with torch._C.DisableTorchFunctionSubclass():
                counter = tensor._version
            if counter != expected:
                raise _changed_in_place(tensor, counter, expected)
            return tensor
        if isinstance(saved, SavedByProgram):
            found: torch.Tensor = saved.unpack(saved.packed)
            return found
        if isinstance(saved, SavedWrapper):
            self._unpack_view(saved.inner)
            return saved.wrapper
        return self._unpack_view(saved) if isinstance(saved, SavedView) else self._unpack_moved(saved)

    @runs_outside_modes
    def _unpack_view(self, saved: SavedView) -> torch.Tensor:
        storage = self._fault_in_saved(saved.unit, saved.version)
        view = storage.view(saved.size, saved.stride, saved.offset, saved.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            counter = storage.param_at(saved.offset * view.itemsize)._version
        if saved.counter is not None and counter != saved.counter:
            raise _changed_in_place(view, counter, saved.counter)
        return view

    @runs_outside_modes
    def _unpack_moved(self, saved: MovedTensor) -> torch.Tensor:
        counter = saved.counter._version
        tensor = saved.unpack()
        if counter != saved.version:
            raise _changed_in_place(tensor, counter, saved.version)
        return tensor


@final
class _ClosedUnits:
    """Holds the units that were resident in an engine, for graphs that outlive the engine."""

    def __init__(self, units: UnitTable) -> None:
        self._resident = {paged.unit: (paged.storage, paged.version) for paged in units if paged.is_resident}

    def __call__(self, unit: Unit, version: int | None) -> FlatStorage:
        """Return the storage of a unit that was resident when the engine closed. Raises ParameterOffloadedError for any
        other unit. Raises ModelError if the unit's weights have changed since `version`."""
        if unit not in self._resident:
            ClosedEngine(unit.name).fault_in((), "This call")
        storage, current = self._resident[unit]
        if version not in (None, current):
            raise changed_weights(unit.name)
        return storage


@final
class _PackInside:
    """A pack hook that saves views of units by name, and passes other tensors to the hooks set before it."""

    def __init__(self, views: SavedViews, outer: tuple[Pack, Unpack]) -> None:
        self.views = views
        self._outer = outer
        self._checkpoint_internal = getattr(outer[0], "_checkpoint_internal", False)

    @property
    def _user_hooks(self) -> tuple[Pack, Unpack] | None:
        """The innermost hooks of the program, if `outer` is not the program's. torch 2.14 asks for them here."""
        return getattr(self._outer[0], "_user_hooks", None)

    def __call__(self, tensor: torch.Tensor) -> Saved:
        saved, (pack, unpack) = self.views.pack(tensor), self._outer
        if isinstance(saved, tuple):
            return SavedByProgram(packed=pack(tensor), unpack=unpack)
        if isinstance(saved, SavedView) and _is_of_checkpoint(pack):
            return replace(saved, version=None, counter=None)
        return saved


def refuse_tracing() -> None:
    if torch._C._get_tracing_state():
        raise ModelError(
            "torch.jit.trace cannot trace a module of a tiered_zero engine: the trace would read parameters while "
            "their bytes are elsewhere. Use a copy: torch.jit.trace(copy.deepcopy(engine.module), ...)."
        )


def changed_weights(unit_name: str) -> ModelError:
    return ModelError(
        f"Backward needs weights of {unit_name} as its forward saw them, and they have changed since (by a step, or by "
        "hand). Call backward before step(), or forward again after it."
    )


def moves_saved_tensors() -> bool:
    """Return whether the tensors that autograd saves now go to an engine's mover."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__func__", None) is SavedViews.pack_and_move


def _is_of_checkpoint(pack: Pack) -> bool:
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def _changed_in_place(tensor: torch.Tensor, found: int, expected: int) -> RuntimeError:
    """Return torch's error for a tensor that was changed in place. It names the node that needs the tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        kind, shape = tensor.type(), list(tensor.shape)
    node = torch._C._current_autograd_node()
    needed = f", which {node.name()} needs," if node is not None else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {shape}]{needed} is at version {found}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


SAVED_TENSOR_HOOKS = SavedViews.pack, SavedViews.pack_and_move, SavedViews.unpack, _PackInside.__call__
"""The functions of this file that autograd calls to save and unpack tensors. torch.compile must not compile them."""
