"""One flat storage a unit: emptied, refilled in place, and guarded while it is not in use.

The parameters of a unit are views of `flat`. `storage.resize_(0)` frees the memory while every view keeps its shape,
dtype and place in autograd's graphs; a later `resize_` and copy brings the bytes back under the same views.
While they are guarded the parameters are views of a second storage, whose address torch refuses.
On the CPU device the storage is a range of huge pages, which stays while its memory is unmapped: see
hardware/memory/huge_pages.py.
"""

from __future__ import annotations

import operator
import sys
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.hardware.memory.huge_pages import PageRange
from tiered_zero.layout.flat import Unit
from tiered_zero.unit.dispatch_key import keyed
from tiered_zero.unit.guarded_parameter import ClosedEngine, OffloadedParameter
from tiered_zero.unit.param_handlers import FaultHandler, release_param, set_data, set_handler
from tiered_zero.unit.param_in_use import class_in_use
from tiered_zero.unit.param_watch import ParamWatch


class FlatStorage:
    """The device memory of one unit. `flat`: [P] of the unit's dtype; it has no memory, or all of it (`is_full`).

    Driver thread.
    """

    def __init__(
        self,
        unit: Unit,
        params: Sequence[nn.Parameter],
        device: torch.device,
        handler: FaultHandler,
        place: PageRange | None = None,
    ) -> None:
        """`place`: where the flat lies; None: the device's allocator gives it memory each time."""
        self.unit = unit
        self._place = place
        self._device = device
        self._params = tuple(params)
        self._entries = tuple(zip(unit.entries, params, strict=True))
        self._starts = [entry.start * unit.itemsize for entry in unit.entries]
        self._classes = tuple(type(param) for param in params)
        self._classes_in_use = tuple(map(class_in_use, self._classes))
        self.watch = ParamWatch(self._params, [slice(entry.start, entry.stop) for entry in unit.entries])
        for param in params:
            set_handler(param, handler)
        self._num_references = self._count_references()
        self._take_storage()
        self.guard()

    def _take_storage(self) -> None:
        """Put all parameters on a new storage, which is empty."""
        guarded = self._new_flat(None if self._place is None else self._place.alias)
        self._keyed_views = [keyed(view) for view in self._views_of(guarded)]
        self._guarded_bytes = guarded.untyped_storage()
        if self._place is None:
            self._guarded_bytes.resize_(0)  # before the next one takes as much
        self.flat = self._new_flat(None if self._place is None else self._place.tensor)
        self.watch.attach(self.flat)
        self._bytes = self.flat.untyped_storage()
        self.key = int(self._bytes._cdata)
        """The identity of the storage, the same for every view of it."""
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
        """Count the uses of both storages, for parameters move from one to the other."""
        count = torch._C._storage_Use_Count
        return int(count(self.key)) + int(count(self._guarded_bytes._cdata))

    @property
    def is_viewed(self) -> bool:
        """Whether other code holds a view: a running node, an output, a custom function. Its memory stays.

        [Note: Frozen parameters that autograd holds]
        Hooks for saved tensors get a frozen parameter itself, not a view of it, and may return it to a node in
        backward, which then reads its memory past the guard. torch.utils.checkpoint does, for what it has computed
        again. Only the parameter's references in Python show it, so these are counted before its module runs. One that
        requires a gradient all the same, as in a run that only evaluates, is no such parameter: the hooks get a view of
        it, and the graph's own node for its gradient refers to it."""
        if self._num_uses > self._num_own_uses:
            return True
        if self.unit.trainable:
            return False
        held = map(operator.gt, self._count_references(), self._num_references)
        with torch._C.DisableTorchFunctionSubclass():
            return any(more and not param.requires_grad for param, more in zip(self._params, held, strict=True))

    def count_references(self, is_recomputed: bool) -> None:
        """Take the references of now as those that do not count as a view; where the module `is_recomputed` in
        backward, the fewer of them. See [Note: Frozen parameters that autograd holds]."""
        if not self.unit.trainable:
            found = self._count_references()
            self._num_references = list(map(min, found, self._num_references)) if is_recomputed else found

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self._params))

    def fill(self) -> None:
        """Allocate the flat's memory; its content is undefined until a transfer has written it."""
        if self._place is not None:
            self._place.fill()
        else:
            self._bytes.resize_(self.unit.nbytes)
        self.is_full = True

    def empty(self, keep: bool = True) -> None:
        """Free the memory. Every view keeps its shape; autograd's version counters do not move. `keep`: False where a
        transfer may still write to it: no other unit gets it.

        A storage that NumPy has viewed can never be resized again; another replaces it, with another key.
        """
        if self._place is not None:
            self._place.empty(keep)
        elif self._bytes.resizable():
            self._bytes.resize_(0)
        else:
            self._take_storage()
            self.guard()
        self.is_full = False

    def blank(self) -> None:
        """Overwrite the values: NaN in every float type. Views that other code has kept then show none, rather than
        those of an earlier step, until the next fetch."""
        self.flat.data.view(torch.uint8).fill_(0xFF)

    def unguard(self) -> None:
        """Let the parameters be used: the bytes are valid."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, view, in_use in zip(self._params, self._views, self._classes_in_use, strict=True):
                set_data(param, view)
                param.__class__ = in_use
        self.watch.begin()

    def end_change(self) -> tuple[str, str] | None:
        """Return the name of a parameter that has changed since `unguard`, or of the unit where only that is known, and
        "" where it was written to; where it was given other memory (`param.data = ...`), which is dropped, the class of
        its module. [Note: Writes through .data]"""
        changed = self.watch.find_change(self.key)
        if self.watch.values and not self.is_viewed:
            self.watch.values.clear()
        if changed is None:
            return None
        if changed < 0:
            self.reattach(keep=False)
            return f"(one of unit {self.unit.name})", ""
        spec, is_own = self.unit.entries[changed].param, self._params[changed].untyped_storage()._cdata == self.key
        self.reattach(keep=False)
        return spec.name, "" if is_own else spec.owner

    def check_converted(self) -> None:
        """Raise ModelError where the first parameter, in use, has another dtype or device than the flat: as
        `module.half()` gives to all of a unit that lives on the device. `end_change` sees what is done to others."""
        param, name = self._params[0], self.unit.entries[0].param.name
        if param.dtype is not self.unit.dtype or param.device != self._device:
            raise ModelError(
                f"Parameter {name} was moved or converted: expected {self.unit.dtype} on {self._device}, found "
                f"{param.dtype} on {param.device}. The engine keeps parameters where the config says (bf16, fp16, "
                "tiered_zero.device): convert the model before tiered_zero.initialize()."
            )

    def reattach(self, keep: bool) -> None:
        """Make parameters views of the flat again, and watch them anew. `keep`: copy values of those that were given
        other memory into it. Raises ModelError for one of another shape."""
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
        self.watch.begin()

    def guard(self) -> None:
        """Make every parameter an OffloadedParameter: its bytes must not be read, in C++ neither."""
        with torch._C.DisableTorchFunctionSubclass():
            for param, view in zip(self._params, self._keyed_views, strict=True):
                param.__class__ = OffloadedParameter  # first: only such a parameter may have the key
                set_data(param, view)

    def view(self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
        """The saved view with this geometry (in elements of `dtype`), on the bytes as they are now."""
        flat = self.flat if dtype == self.unit.dtype else self.flat.view(dtype)
        return flat.as_strided(size, stride, offset)

    def param_at(self, offset_nbytes: int) -> nn.Parameter:
        """The parameter that has the byte at this offset into the flat."""
        return self._params[bisect_right(self._starts, offset_nbytes) - 1]

    def detach_params(self) -> None:
        """Release the parameters when the engine closes: those with bytes keep a copy, or the view where the device has
        no room for one; the others stay guarded."""
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
        """Cut the parameters off when the engine closes: they stay guarded, and hold nothing of the engine any more."""
        self.guard()
        for param, own in zip(self._params, self._classes, strict=True):
            set_handler(param, ClosedEngine(self.unit.name, own))
