"""Hold a unit on the device: its flat, its state, and the table of legal state changes.

The parameters of a unit are views of its flat. `storage.resize_(0)` frees the flat's memory while every view keeps its
shape, dtype and place in autograd's graphs; a later `resize_` and copy bring the bytes back under the same views.
Guarded parameters are views of a second storage, whose address torch refuses to give. If the CPU computes, the memory
of a paged unit may be huge pages (hardware/memory/huge_pages.py).

[Note: State of a unit] `UnitState` and `WeightState` hold the state of a unit. They change together, and only in
`PagedUnit`. Everything else is a plain field, or a fact about the storage: `is_full` (the flat has memory) and
`is_viewed` (other code holds a view of the flat: a running node, a recomputed tensor, or an output). A viewed flat
keeps its memory, even when its unit is OFFLOADED. So an eviction or a wrong prefetch cannot free memory that a
computation reads. At worst the device lacks room, and BudgetError is raised. A resident unit is IN_USE, or CACHED while
it waits for its update. `Pager.abort` returns all other units to OFFLOADED, except one that a `gathered` block uses or
a transfer still fetches.

[Note: Writes through .data] A change in place moves the version counter of the parameter, or of the flat if a node of
backward changes what forward saved. `param.data.mul_()` moves it too, since `data` of a parameter in use is `detach()`.
A write through a NumPy array or an address moves no counter. So the engine copies a parameter's values before user code
gets its memory. It compares the values with this copy, bit for bit, when the use ends, or when user code next gets the
memory of a parameter. It keeps the copy as long as other code holds a view of the unit. Code that never asks for the
memory pays nothing. Three kinds of writes are not seen: through `.data` of a view that indexing did not make
(`param.t().data`), through an address kept from earlier, and through a view while its unit is offloaded."""

from __future__ import annotations

import operator
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import InternalError, ModelError
from tiered_zero.hardware.memory.huge_pages import PageRange
from tiered_zero.layout.flat import Unit
from tiered_zero.unit.guard import (
    ClosedEngine,
    FaultHandler,
    OffloadedParameter,
    class_in_use,
    keyed,
    release_param,
    set_data,
    set_handler,
)

_version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> the integer dtype of that size. Values are compared bit for bit as integers, because a float
NaN differs from itself. Elements of 8 bytes or more are compared as int64."""


class FlatStorage:
    """The device memory of one unit, and the views of it that are the unit's parameters. Used on the Pager's threads.
    `flat`: all P elements, in the unit's dtype; it has memory only while `is_full`."""

    def __init__(
        self,
        unit: Unit,
        params: Sequence[nn.Parameter],
        device: torch.device,
        handler: FaultHandler,
        place: PageRange | None = None,
    ) -> None:
        """`handler`: fetches the bytes of a guarded parameter. `place`: the huge pages of the flat; None: `fill` takes
        memory from the device's allocator."""
        self.unit = unit
        self._place = place
        self._device = device
        self._params = tuple(params)
        self._entries = tuple(zip(unit.entries, params, strict=True))
        self._starts = [entry.start * unit.itemsize for entry in unit.entries]
        self._classes = tuple(type(param) for param in params)
        self._classes_in_use = tuple(map(class_in_use, self._classes))
        self._versions = [0] * len(self._params)
        self._flat_version = 0
        self._watched: dict[int, torch.Tensor] = {}
        """Index of a parameter -> a copy of its values, kept until no view of the unit is left."""
        for param in params:
            set_handler(param, handler)
        self._num_references = self._count_references()
        self._take_storage()
        self.guard()

    def _take_storage(self) -> None:
        """Create the flat and the storage of guarded parameters, both without memory. Make all parameters views of the
        flat."""
        guarded = self._new_flat(None if self._place is None else self._place.alias)
        self._keyed_views = [keyed(view) for view in self._views_of(guarded)]
        self._guarded_bytes = guarded.untyped_storage()
        if self._place is None:
            self._guarded_bytes.resize_(0)  # before the next one takes as much
        self.flat = self._new_flat(None if self._place is None else self._place.tensor)
        self._bytes = self.flat.untyped_storage()
        self.key = int(self._bytes._cdata)
        """The identity of the flat's storage, the same for every view of it."""
        with torch._C.DisableTorchFunctionSubclass():
            self._views = self._views_of(self.flat)
            for param, view in zip(self._params, self._views, strict=True):
                set_data(param, view)
        del guarded
        self._num_own_uses = self._num_uses
        if self._place is None:
            self._bytes.resize_(0)
        self.is_full = False

    def _new_flat(self, memory: torch.Tensor | None) -> torch.Tensor:
        if memory is not None:
            return memory.view(self.unit.dtype)
        return torch.empty(self.unit.numel, dtype=self.unit.dtype, device=self._device)

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [entry.param.view(flat[entry.start : entry.stop]) for entry in self.unit.entries]

    @property
    def _num_uses(self) -> int:
        """The number of references to the flat's storage and to the storage of guarded parameters. Guarding parameters
        does not change this number."""
        count = torch._C._storage_Use_Count
        return int(count(self.key)) + int(count(self._guarded_bytes._cdata))

    @property
    def is_viewed(self) -> bool:
        """Whether other code holds a view of the flat, which then keeps its memory.

        [Note: Frozen parameters that autograd holds]
        Hooks for saved tensors get a frozen parameter itself, not a view of it. They may return it to a node in
        backward, which then reads its memory without the guard; torch.utils.checkpoint does this. Only the number of
        Python references to the parameter shows this. They are counted before the parameter's module runs; a higher
        count later means that autograd holds the parameter. A parameter that requires a gradient is not compared: its
        graph adds references, and the hooks get a view of it."""
        if self._num_uses > self._num_own_uses:
            return True
        if self.unit.trainable:
            return False
        held = map(operator.gt, self._count_references(), self._num_references)
        # in evaluation a unit that is not trainable may have parameters that require a gradient
        with torch._C.DisableTorchFunctionSubclass():
            return any(more and not param.requires_grad for param, more in zip(self._params, held, strict=True))

    def count_references(self, is_recomputed: bool) -> None:
        """Store the number of references to each frozen parameter, for `is_viewed`. `is_recomputed`: whether the module
        runs again in backward. If so, keep the smaller of the stored and the new number. [Note: Frozen parameters that
        autograd holds]"""
        if not self.unit.trainable:
            found = self._count_references()
            self._num_references = list(map(min, found, self._num_references)) if is_recomputed else found

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self._params))

    def fill(self) -> None:
        """Allocate the flat's memory. Its content is undefined until a transfer has written it."""
        if self._place is not None:
            self._place.fill()
        else:
            self._bytes.resize_(self.unit.nbytes)
        self.is_full = True

    def empty(self, keep: bool = True) -> None:
        """Free the flat's memory; every view keeps its shape and version counter. `keep`: whether the flat's huge pages
        are kept for other units. Pass False if a transfer may still write to them."""
        if self._place is not None:
            self._place.empty(keep)
        elif self._bytes.resizable():
            self._bytes.resize_(0)
        else:  # NumPy has viewed the storage: a new one replaces it, with another `key`
            self._take_storage()
            self.guard()
        self.is_full = False

    def blank(self) -> None:
        """Fill the flat with NaN (0xFF bytes), so that views kept by other code do not show values of an earlier
        step."""
        self.flat.data.view(torch.uint8).fill_(0xFF)

    def unguard(self) -> None:
        """Remove the guard from the parameters. The flat's bytes must be valid."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, view, in_use in zip(self._params, self._views, self._classes_in_use, strict=True):
                set_data(param, view)
                param.__class__ = in_use
        self.begin_watch()

    # -- [Note: Writes through .data] ----------------------------------------------------------------------------------

    def begin_watch(self) -> None:
        """Begin to watch for changes by user code: record the version counters, and copy the watched values again.
        `take_change` compares with both."""
        self._versions = list(map(_version_of, self._params))
        self._flat_version = self.flat._version
        if self._watched:
            self._watched = {index: self._words(index).clone() for index in self._watched}

    def watch_values(self, index: int) -> None:
        """Copy the values of parameter number `index`, before user code gets the parameter's memory. `take_change`
        compares the values with this copy."""
        if index not in self._watched:
            self._watched[index] = self._words(index).clone()

    def _words(self, index: int) -> torch.Tensor:
        entry = self.unit.entries[index]
        values = self.flat[entry.start : entry.stop]
        return values.view(_WORDS.get(values.itemsize, torch.int64))

    def take_change(self) -> tuple[str, str] | None:
        """Return (name, module class) of a parameter changed since `begin_watch`; None if none has changed. The module
        class is "" unless user code gave the parameter other memory (`param.data = ...`). After a change, make all
        parameters views of the flat again."""
        changed = self._find_change()
        if self._watched and not self.is_viewed:
            self._watched.clear()
        if changed is not None:
            self.reattach(keep=False)
        return changed

    def _find_change(self) -> tuple[str, str] | None:
        for (entry, param), version in zip(self._entries, self._versions, strict=True):
            if param.untyped_storage()._cdata != self.key:
                return entry.param.name, entry.param.owner
            if param._version != version:
                return entry.param.name, ""
        for index, values in self._watched.items():
            if not torch.equal(self._words(index), values):
                return self.unit.entries[index].param.name, ""
        return None if self.flat._version == self._flat_version else (f"(one of unit {self.unit.name})", "")

    def check_converted(self) -> None:
        """Raise ModelError if the unit was moved or converted, as by `module.half()`. Check only the unit's first
        parameter. The unit must be in use."""
        # `module.half()` converts all parameters, so the first shows it; `take_change` finds a change of another alone
        param, name = self._params[0], self.unit.entries[0].param.name
        if param.dtype is not self.unit.dtype or param.device != self._device:
            raise ModelError(
                f"Parameter {name} was moved or converted: expected {self.unit.dtype} on {self._device}, found "
                f"{param.dtype} on {param.device}. The engine keeps parameters where the config says (bf16, fp16, "
                "tiered_zero.device): convert the model before tiered_zero.initialize()."
            )

    def reattach(self, keep: bool) -> None:
        """Make parameters views of the flat again if user code gave them other memory. Then begin to watch anew for
        changes. `keep`: True copies the values from that memory into the flat, and raises ModelError if a shape
        differs; False drops the values."""
        key = self.key
        for entry, param in self._entries:
            if param.untyped_storage()._cdata == key:
                continue
            if keep and param.shape != entry.param.shape:
                raise ModelError(
                    f"Parameter {entry.param.name} was given data of shape {tuple(param.shape)}; its place on the "
                    f"tiers holds {entry.param.shape}. Make a new engine for a model of another shape."
                )
            own = entry.param.view(self.flat[entry.start : entry.stop])
            if keep:
                own.copy_(torch.Tensor.detach(param))
            set_data(param, own)
        self.begin_watch()

    def guard(self) -> None:
        """Make every parameter an OffloadedParameter. Python and C++ code can then read no bytes without a fetch."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, view in zip(self._params, self._keyed_views, strict=True):
                param.__class__ = OffloadedParameter  # first: only such a parameter may have the key
                set_data(param, view)

    def view(self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the flat with this geometry. `size`, `stride`, `offset`: counted in elements of `dtype`."""
        flat = self.flat if dtype == self.unit.dtype else self.flat.view(dtype)
        return flat.as_strided(size, stride, offset)

    def param_at(self, offset_nbytes: int) -> nn.Parameter:
        """Return the parameter that contains the byte at this offset in the flat."""
        return self._params[bisect_right(self._starts, offset_nbytes) - 1]

    def detach_params(self) -> None:
        """Make the parameters plain when the engine closes, with copies of their values, or with views of the flat if
        memory for copies is short. If the flat has no memory, guard the parameters instead."""
        if not self.is_full:
            self.orphan_params()
            return
        with torch._C.DisableTorchFunctionSubclass():
            for param, view, own in zip(self._params, self._views, self._classes, strict=True):
                try:
                    values = view.clone()
                except torch.OutOfMemoryError:  # as when it was out of memory before, which ends the run
                    values = view
                set_data(param, values)
                release_param(param, own)

    def orphan_params(self) -> None:
        """Guard the parameters when the engine closes. Remove their references to the engine."""
        self.guard()
        for param, own in zip(self._params, self._classes, strict=True):
            set_handler(param, ClosedEngine(self.unit.name, own))


class UnitState(Enum):
    """Which bytes of a unit are on the device.

    * OFFLOADED: none that are valid; the values are at the unit's home.
    * FETCHING: device memory is allocated and a transfer fills it. Compute has not waited for the transfer yet.
    * CACHED: all; the parameters are guarded.
    * IN_USE: all; the parameters are plain. Users hold the unit, or backward holds it until its gradients are complete
      or its memory is needed."""

    __hash__ = object.__hash__  # Enum's own runs in Python, twice for each change
    OFFLOADED = "offloaded"
    FETCHING = "fetching"
    CACHED = "cached"
    IN_USE = "in use"


class WeightState(Enum):
    """Which weights a fetch from the unit's home brings.

    * CURRENT: those of the last step. If their update still runs, the fetch waits for it.
    * UPDATING: those of the present step, whose update began in backward. Any use raises until step() is called.
    * STALE: weights from before user code changed them on the device. The change is dropped when the use ends."""

    __hash__ = object.__hash__
    CURRENT = "current"
    UPDATING = "updating"
    STALE = "stale"


State = tuple[UnitState, WeightState]

_OFFLOADED = UnitState.OFFLOADED, WeightState.CURRENT
_OFFLOADED_UPDATING = UnitState.OFFLOADED, WeightState.UPDATING
_FETCHING = UnitState.FETCHING, WeightState.CURRENT
_FETCHING_UPDATING = UnitState.FETCHING, WeightState.UPDATING
_CACHED = UnitState.CACHED, WeightState.CURRENT
_CACHED_UPDATING = UnitState.CACHED, WeightState.UPDATING
_IN_USE = UnitState.IN_USE, WeightState.CURRENT
_IN_USE_STALE = UnitState.IN_USE, WeightState.STALE

LEGAL_CHANGES: dict[tuple[State, State], str] = {
    (_OFFLOADED, _FETCHING): "fetch",
    (_OFFLOADED_UPDATING, _FETCHING_UPDATING): "fetch",  # ahead of use, once the update is done
    (_FETCHING, _IN_USE): "acquire",
    (_CACHED, _IN_USE): "acquire",
    (_IN_USE, _CACHED): "guard",
    (_OFFLOADED, _OFFLOADED): "evict",  # frees what a view had kept
    (_OFFLOADED_UPDATING, _OFFLOADED_UPDATING): "evict",
    (_FETCHING, _OFFLOADED): "evict",
    (_FETCHING_UPDATING, _OFFLOADED_UPDATING): "evict",
    (_CACHED, _OFFLOADED): "evict",
    (_IN_USE, _OFFLOADED): "evict",
    (_IN_USE_STALE, _OFFLOADED): "evict",
    (_IN_USE, _IN_USE_STALE): "write",
    (_OFFLOADED, _OFFLOADED_UPDATING): "block",
    (_CACHED, _CACHED_UPDATING): "block",
    (_OFFLOADED_UPDATING, _OFFLOADED): "unblock",
    (_FETCHING_UPDATING, _FETCHING): "unblock",
    (_CACHED_UPDATING, _CACHED): "unblock",
}
"""(state before, state after) -> the name of the operation that makes this change. No other change is legal."""


class StepEvents(Protocol):
    """Receives events from the pager and from `gathered`. The engine's TrainStep implements it."""

    def notice_backward(self) -> None:
        """Begin to follow the running backward, if the user started it without the engine. Called before a parameter is
        fetched."""

    def before_use(self, unit: Unit, pass_name: str) -> None:
        """Record that a pass is about to gather and use `unit`. Called only with several ranks, because these must
        fetch units in the same order. Several uses of one unit in a row, in one pass, give one call."""

    def before_weights_read(self) -> None:
        """Make every update visible, before weights are read between steps."""

    def before_weights_write(self) -> None:
        """Wait for every update, and drop state read ahead for the next one, before weights are written between
        steps."""

    def latch(self, why: str) -> None:
        """Refuse every later call, because a change of weights has failed halfway. `why`: the failure, for the
        error."""


@dataclass(eq=False, kw_only=True)
class PagedUnit:
    """What the pager knows about one unit: its storage, state, users and version."""

    unit: Unit
    storage: FlatStorage
    is_resident: bool
    own: slice
    """The elements of the flat that the unit's home holds: all, or this rank's shard."""
    params: dict[nn.Parameter, int]
    """Parameter -> its index in the unit."""
    events: StepEvents
    fetch: Transfer | None = None
    """The transfer that fills the storage; None once compute has waited for it."""
    num_users: int = 0
    """The number of running modules and `gathered` blocks that use the unit; one more if it is resident."""
    version: int = 0
    """The number of changes of the values so far. Backward raises for a graph that saved an earlier version."""
    num_gathers: int = 0
    """The number of running `gathered` blocks that use the unit. `num_users` counts these too."""
    num_writers: int = 0
    """The number of open blocks in which user code may change the unit."""
    state: UnitState = UnitState.OFFLOADED
    weights: WeightState = WeightState.CURRENT

    def __post_init__(self) -> None:
        if self.is_resident:
            self.state = UnitState.CACHED

    # One method for each act of LEGAL_CHANGES, and for users and the version. No other code writes these fields.

    def begin_fetch(self) -> None:
        self._change(UnitState.FETCHING)

    def begin_use(self) -> None:
        """Enter IN_USE: the unit's bytes have come, and compute may use them."""
        self._change(UnitState.IN_USE)
        self.fetch = None

    def guard(self) -> None:
        self._change(UnitState.CACHED)

    def end_residence(self) -> None:
        """Enter OFFLOADED: the bytes on the device are no longer valid. If `weights` is STALE, set `weights` to
        CURRENT."""
        self._change(UnitState.OFFLOADED, WeightState.CURRENT if self.weights is WeightState.STALE else None)
        self.fetch = None

    def mark_stale(self) -> None:
        """Mark the unit as STALE if it is in use and not resident. User code has written to it, and its home has older
        weights."""
        if (self.state, self.weights) == _IN_USE and not self.is_resident:
            self._change(UnitState.IN_USE, WeightState.STALE)

    def block(self) -> None:
        """Enter UPDATING, because the unit's update begins before step(). Until step(), any use of the unit raises."""
        if self.weights is not WeightState.UPDATING:  # a second backward finds it blocked
            self._change(self.state, WeightState.UPDATING)

    def unblock(self) -> None:
        if self.weights is WeightState.UPDATING:
            self._change(self.state, WeightState.CURRENT)

    def add_user(self) -> None:
        self.num_users += 1

    def remove_user(self) -> None:
        self.num_users -= 1
        assert self.num_users >= 0, f"{self.unit.name} released more often than acquired"

    def reset_users(self, num_users: int) -> None:
        self.num_users = num_users

    def renew(self) -> None:
        """Increment `version` before the unit's values change."""
        self.version += 1

    def _change(self, state: UnitState, weights: WeightState | None = None) -> None:
        """Set the unit's `state`, and its `weights` if given. Guard or unguard the parameters to match. If
        LEGAL_CHANGES does not contain the change, change nothing and raise InternalError."""
        before = self.state, self.weights
        after = state, before[1] if weights is None else weights
        if (before, after) not in LEGAL_CHANGES:
            raise InternalError(
                f"Unit {self.unit.name} cannot change from {_describe(before)} to {_describe(after)}. This is an error "
                "in tiered_zero, not in the model: please report it with this message."
            )
        if state is UnitState.IN_USE and before[0] is not state:
            self.storage.unguard()
        self.state, self.weights = after
        if state is UnitState.OFFLOADED or state is UnitState.CACHED:
            self.storage.guard()

    @property
    def is_idle(self) -> bool:
        """Whether the unit has no users and is not OFFLOADED, even if other code holds views of its flat."""
        return not self.num_users and self.state is not UnitState.OFFLOADED

    @property
    def waits_for_step(self) -> bool:
        """Whether step() will change the unit: it is trainable, and its update has not begun in backward."""
        return self.unit.trainable and self.weights is not WeightState.UPDATING

    @property
    def is_kept(self) -> bool:
        """Whether the unit is offloaded but its memory is not freed, because a view refers to the memory."""
        return self.state is UnitState.OFFLOADED and self.storage.is_full

    @property
    def is_evictable(self) -> bool:
        """Whether the unit has no users and its eviction would free memory."""
        if self.num_users or not self.storage.is_full:
            return False
        return self.state is UnitState.FETCHING or not self.storage.is_viewed  # a fetch holds a view itself


def _describe(state: State) -> str:
    return f"{state[0].name}/{state[1].name}"


@dataclass(eq=False, kw_only=True)
class UnitTable:
    """Finds the PagedUnit of a unit, of a parameter, or of a storage (by its `FlatStorage.key`)."""

    by_unit: dict[Unit, PagedUnit] = field(default_factory=dict)
    by_param: dict[nn.Parameter, PagedUnit] = field(default_factory=dict)
    by_storage: dict[int, PagedUnit] = field(default_factory=dict)

    def add(self, paged: PagedUnit) -> None:
        self.by_unit[paged.unit] = paged
        self.by_storage[paged.storage.key] = paged
        self.by_param.update(dict.fromkeys(paged.params, paged))

    def renew_storages(self) -> None:
        self.by_storage = {paged.storage.key: paged for paged in self}

    def __iter__(self) -> Iterator[PagedUnit]:
        return iter(self.by_unit.values())
