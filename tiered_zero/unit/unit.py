"""Hold a unit on the device: its flat, its state, and the table of legal state changes.

The parameters of a unit are views of its flat. `storage.resize_(0)` frees the flat's memory while every view keeps its
shape, dtype and place in autograd's graphs; a later `resize_` and copy bring the bytes back under the same views.
Guarded parameters are views of a second storage, whose address torch refuses to give.
On the CPU device the storage is a range of huge pages, which keeps its address while its memory is unmapped: see
hardware/memory/huge_pages.py.

[Note: State of a unit]
Two enums hold the state of a unit: `UnitState` and `WeightState`. They change together, and only in `PagedUnit`.
Everything else is a plain field (`num_users`, `version`, `fetch`) or a fact about the storage: `is_full` (the flat has
memory) and `is_viewed` (other code holds a view of the flat). Such a view may belong to a node that runs, to a tensor
that a checkpointed region has recomputed, or to an output that is a slice of a weight. A viewed flat keeps its memory,
even when its unit is OFFLOADED. So neither eviction nor a wrong prefetch can free memory that a computation reads; at
worst the budget is exceeded, which raises.
A unit that lives on the device has its storage as its home: it is IN_USE, or CACHED while it waits for its update.
`Pager.abort` returns a unit from every state to OFFLOADED, except a unit that lives on the device, that a `gathered`
block uses, or that a transfer still fetches.

[Note: Writes through .data]
A change in place moves the version counter of the parameter, or of the flat if a node of backward changes what forward
saved. `param.data.mul_()` moves the counter too, since `data` of a parameter in use is `detach()` (unit/guard.py). A
write through a NumPy array moves no counter. So before user code gets the memory of a parameter in use, the engine
copies the parameter's values. It compares the values with this copy, bit for bit, when the use ends. The comparison
comes earlier, when user code next gets the memory of a parameter, if no view of the unit is left then. Code that never
asks for the memory pays nothing; code that asks pays a copy and a comparison. If a view is kept after the use, the
values are watched as long as the view.
Three kinds of writes are not seen: through `.data` of a view that indexing did not make (`param.t().data`), through an
address kept from earlier, and through a view while its unit is offloaded."""

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
"""Bytes of an element -> an integer dtype of that size, to compare values bit for bit: as a float NaN differs from
itself. Elements of 8 bytes or more are compared as int64."""


class FlatStorage:
    """The device memory of one unit, and the views of it that are the unit's parameters.

    `flat`: all P elements of the unit, in its dtype. It has memory only while `is_full`. Driver thread."""

    def __init__(
        self,
        unit: Unit,
        params: Sequence[nn.Parameter],
        device: torch.device,
        handler: FaultHandler,
        place: PageRange | None = None,
    ) -> None:
        """`handler`: fetches the bytes of a guarded parameter when code reads it. `place`: the huge pages in which the
        flat lies; None: the device's allocator gives the flat memory at each `fill`."""
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
        """Index of a parameter -> a copy of its values, made before user code got its memory, and kept until no view of
        the unit is left."""
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
        """The references to the flat's storage plus those to the storage of guarded parameters. Guarding moves
        references from the first to the second and leaves the sum unchanged."""
        count = torch._C._storage_Use_Count
        return int(count(self.key)) + int(count(self._guarded_bytes._cdata))

    @property
    def is_viewed(self) -> bool:
        """Whether other code holds a view of the flat: a running node, an output, a custom function. The flat then
        keeps its memory.

        [Note: Frozen parameters that autograd holds]
        Hooks for saved tensors get a frozen parameter itself, not a view of it. They may return the parameter to a node
        in backward, which then reads its memory without the guard; torch.utils.checkpoint does this with what it has
        recomputed. Only the number of Python references to the parameter shows this. So references are counted before
        the parameter's module runs, and a higher count later means that autograd holds the parameter.
        References to a parameter that requires a gradient are not compared: its graph adds references of its own, and
        the hooks get a view of it. (A run that only evaluates may have such parameters in units that are not
        trainable.)"""
        if self._num_uses > self._num_own_uses:
            return True
        if self.unit.trainable:
            return False
        held = map(operator.gt, self._count_references(), self._num_references)
        with torch._C.DisableTorchFunctionSubclass():
            return any(more and not param.requires_grad for param, more in zip(self._params, held, strict=True))

    def count_references(self, is_recomputed: bool) -> None:
        """Count the references to each parameter of a frozen unit and store the numbers, with which `is_viewed`
        compares later counts. `is_recomputed`: True: the module runs again in backward; keep an old number that is
        smaller than the new one. See [Note: Frozen parameters that autograd holds]."""
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
        """Free the flat's memory. Every view keeps its shape, and autograd's version counters do not move. A storage
        that NumPy has viewed cannot be resized: a new storage with another `key` replaces it.

        `keep`: whether another unit may get the memory; False if a transfer may still write to it."""
        if self._place is not None:
            self._place.empty(keep)
        elif self._bytes.resizable():
            self._bytes.resize_(0)
        else:
            self._take_storage()
            self.guard()
        self.is_full = False

    def blank(self) -> None:
        """Fill the flat with 0xFF bytes, which are NaN in every float dtype. Views that other code has kept then show
        NaN until the next fetch, not the values of an earlier step."""
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
        """Begin to look for changes by user code: record the version counters of the flat and of the parameters. Where
        `watch_values` has copied the values of a parameter, replace the copy by the present values. `end_change`
        compares with all of these."""
        self._versions = list(map(_version_of, self._params))
        self._flat_version = self.flat._version
        if self._watched:
            self._watched = {index: self._words(index).clone() for index in self._watched}

    def watch_values(self, index: int) -> None:
        """Copy the values of the unit's parameter number `index`, for `end_change` to compare. Called before user code
        gets the parameter's memory."""
        if index not in self._watched:
            self._watched[index] = self._words(index).clone()

    def _words(self, index: int) -> torch.Tensor:
        entry = self.unit.entries[index]
        values = self.flat[entry.start : entry.stop]
        return values.view(_WORDS.get(values.itemsize, torch.int64))

    def end_change(self) -> tuple[str, str] | None:
        """Return (parameter name, class name) for one parameter that has changed since `begin_watch`; None if none has.
        After a change, make all parameters views of the flat again.

        If the parameter was written to, the class name is empty. If it was given other memory (`param.data = ...`), the
        class name is that of its module, and the other memory is dropped. If only the flat's version counter has moved,
        the parameter is unknown, and the text names the unit."""
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
        """Raise ModelError if the unit's first parameter has another dtype or device than the unit. Called for units in
        use.

        `module.half()` converts all parameters of a unit that lives on the device, so the first parameter shows it.
        `end_change` finds a conversion of another parameter alone."""
        param, name = self._params[0], self.unit.entries[0].param.name
        if param.dtype is not self.unit.dtype or param.device != self._device:
            raise ModelError(
                f"Parameter {name} was moved or converted: expected {self.unit.dtype} on {self._device}, found "
                f"{param.dtype} on {param.device}. The engine keeps parameters where the config says (bf16, fp16, "
                "tiered_zero.device): convert the model before tiered_zero.initialize()."
            )

    def reattach(self, keep: bool) -> None:
        """Make parameters that were given other memory views of the flat again, and record all version counters anew.
        `keep`: True copies the values of the other memory into the flat, and raises ModelError if a shape differs;
        False drops these values."""
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
        """Make every parameter an OffloadedParameter, whose bytes neither Python nor C++ code can read."""
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
        """Release the parameters when the engine closes. If the flat has memory, each parameter becomes a plain one
        with a copy of its values; if the device has no memory for a copy, it keeps its view of the flat. If the flat
        has no memory, the parameters stay guarded."""
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
        """Guard the parameters for good when the engine closes, and set a ClosedEngine as their handler. They then
        refer to nothing of the engine."""
        self.guard()
        for param, own in zip(self._params, self._classes, strict=True):
            set_handler(param, ClosedEngine(self.unit.name, own))


class UnitState(Enum):
    """Which bytes of a unit are on the device.

    * OFFLOADED: none; all are in the unit's home.
    * FETCHING: device memory is allocated and a transfer fills it. Compute has not waited for the transfer yet.
    * CACHED: all; the parameters are guarded.
    * IN_USE: all; the parameters are plain. Users hold the unit, or backward holds it until its memory is needed."""

    __hash__ = object.__hash__  # Enum's own runs in Python, twice for each change
    OFFLOADED = "offloaded"
    FETCHING = "fetching"
    CACHED = "cached"
    IN_USE = "in use"


class WeightState(Enum):
    """Which weights a fetch from the unit's home brings.

    * CURRENT: those of the last step. The fetch waits for the parts of that step's update that still run.
    * UPDATING: those of a step that is not taken yet, because its update began in backward. Any use of the unit raises.
    * STALE: older weights than those on the device, to which user code has written. The written weights are dropped at
      the end of the use."""

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
"""(before, after) -> the act that makes this change. No other change is legal."""


class StepEvents(Protocol):
    """Interface of the object that orders a step (the engine's TrainStep). It receives the events that the pager
    notices and that no call of the engine announces."""

    def notice_backward(self) -> None:
        """Record that a backward is about to use a parameter. If the user started the backward without the engine
        (`loss.backward()`), the engine learns here that it has begun."""

    def before_use(self, unit: Unit, pass_name: str) -> None:
        """Record that the pass "forward" or "backward" is about to use `unit`, before the unit is gathered. Called only
        with several ranks, because these must fetch units in the same order. If one pass uses a unit several times in a
        row, this is called once."""

    def before_weights_read(self) -> None:
        """Make every update visible, before weights are read between steps."""

    def before_weights_write(self) -> None:
        """End every update, and drop what was prefetched for the next one, before weights are written between steps."""

    def latch(self, why: str) -> None:
        """Refuse every later call, because a change of weights has failed half way. `why`: the failure, for the
        error."""


@dataclass(eq=False, kw_only=True)
class PagedUnit:
    """The pager's record of one unit.

    `is_resident`: whether the unit lives on the device. `own`: the elements of the flat that the unit's home holds, all
    or this rank's shard. `params`: parameter -> its index in the unit. `fetch`: the transfer that fills the storage;
    None once compute has waited for it. `num_users`: the number of running modules and `gathered` blocks that use the
    unit, plus one if it lives on the device. A unit without users may still be IN_USE, held for the rest of its
    backward. `num_gathers`: the number of `gathered` blocks among the users. `num_writers`: the number of blocks that
    may change the unit. `version`: how often the unit's values have changed; backward raises for a graph that saved an
    earlier version."""

    unit: Unit
    storage: FlatStorage
    is_resident: bool
    own: slice
    params: dict[nn.Parameter, int]
    events: StepEvents
    fetch: Transfer | None = None
    num_users: int = 0
    version: int = 0
    num_gathers: int = 0
    num_writers: int = 0
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
        """Enter OFFLOADED: the device holds no valid bytes of the unit any more. STALE weights become CURRENT: what
        user code wrote is dropped, and the unit has its home's weights again."""
        self._change(UnitState.OFFLOADED, WeightState.CURRENT if self.weights is WeightState.STALE else None)
        self.fetch = None

    def mark_stale(self) -> None:
        """Mark the weights of a unit in use as STALE, because user code has written to them and the home has older
        ones. Do nothing if the unit lives on the device: its storage is its home."""
        if (self.state, self.weights) == _IN_USE and not self.is_resident:
            self._change(UnitState.IN_USE, WeightState.STALE)

    def block(self) -> None:
        """Enter UPDATING, in which any use of the unit raises: its update has begun before the step is taken."""
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
        """Increment `version`, before the unit's values change. Backward through a graph that saved the old values then
        raises."""
        self.version += 1

    def _change(self, state: UnitState, weights: WeightState | None = None) -> None:
        """Enter `state`, and `weights` if given. Guard or unguard the parameters to match.

        Raises InternalError, with nothing changed, if LEGAL_CHANGES does not contain the change."""
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
        """Whether the unit has no users and is not OFFLOADED. Other code may hold views of its flat."""
        return not self.num_users and self.state is not UnitState.OFFLOADED

    @property
    def waits_for_step(self) -> bool:
        """Whether step() will change the unit: it is trainable, and its update has not begun in backward."""
        return self.unit.trainable and self.weights is not WeightState.UPDATING

    @property
    def is_kept(self) -> bool:
        """Whether the unit is offloaded and a view still keeps its memory."""
        return self.state is UnitState.OFFLOADED and self.storage.is_full

    @property
    def is_evictable(self) -> bool:
        """Whether the unit has no users and its eviction would free memory. A view of the unit prevents that, except
        the view that a running fetch itself holds."""
        if self.num_users or not self.storage.is_full:
            return False
        return self.state is UnitState.FETCHING or not self.storage.is_viewed


def _describe(state: State) -> str:
    return f"{state[0].name}/{state[1].name}"


@dataclass(eq=False, kw_only=True)
class UnitTable:
    """Every unit of a model, by index, by parameter and by the identity of its storage."""

    by_index: dict[int, PagedUnit] = field(default_factory=dict)
    by_param: dict[nn.Parameter, PagedUnit] = field(default_factory=dict)
    by_storage: dict[int, PagedUnit] = field(default_factory=dict)

    def add(self, paged: PagedUnit) -> None:
        self.by_index[paged.unit.index] = paged
        self.by_storage[paged.storage.key] = paged
        self.by_param.update(dict.fromkeys(paged.params, paged))

    def renew_storages(self) -> None:
        self.by_storage = {paged.storage.key: paged for paged in self}

    def __iter__(self) -> Iterator[PagedUnit]:
        return iter(self.by_index.values())
