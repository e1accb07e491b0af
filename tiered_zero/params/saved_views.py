"""What autograd saves of a unit for backward: which unit, not the address of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.params.flat_storage import FlatStorage
from tiered_zero.params.outside_modes import runs_outside_modes
from tiered_zero.params.unit_state import UnitTable


@dataclass(frozen=True, kw_only=True)
class SavedView:
    """What autograd keeps instead of a view of a flat: which unit in which version, and the view's geometry in
    elements."""

    unit_index: int
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class SavedWrapper:
    """What autograd keeps of a view of a flat inside a torch.func transform: the transform's wrapper cannot be made
    anew, so its bytes stay. `view`: keeps them there (`FlatStorage.is_viewed`), for the wrapper itself does not."""

    wrapper: torch.Tensor
    view: torch.Tensor
    inner: SavedView


Saved = torch.Tensor | SavedView | SavedWrapper


@final
class SavedViews:
    """The pair of saved-tensor hooks of one engine. Autograd calls them: `pack` on the thread of forward, `unpack` on
    that of backward."""

    def __init__(self, units: UnitTable, fault_in_saved: Callable[[int, int], FlatStorage]) -> None:
        """`fault_in_saved(unit_index, version)`: the unit's storage, filled for the backward that runs."""
        self._units = units
        self._fault_in_saved = fault_in_saved

    @runs_outside_modes
    def pack(self, tensor: torch.Tensor) -> Saved:
        """Save a view of a unit's flat by name, anything else as it is."""
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        with torch._C.DisableTorchFunctionSubclass():
            key = inner.untyped_storage()._cdata
        paged = self._units.by_storage.get(key)
        if paged is None:
            return tensor
        size, stride, offset = tuple(inner.size()), inner.stride(), int(inner.storage_offset())
        saved = SavedView(
            unit_index=paged.unit.index,
            version=paged.version,
            size=size,
            stride=stride,
            offset=offset,
            dtype=inner.dtype,
        )
        return saved if inner is tensor else SavedWrapper(wrapper=tensor, view=inner.detach(), inner=saved)

    def save_recomputed(self) -> None:
        """In a backward, save by name also what is computed again, where no other hooks save it.

        In one that the user has started past the engine none do, and autograd would save parameters themselves, whose
        bytes go as their unit is evicted. The hooks stay until the node of the backward that runs has ended: autograd
        then restores those of its thread."""
        hooks = torch._C._autograd
        if (
            torch._C._current_graph_task_id() != -1
            and torch.is_grad_enabled()
            and hooks._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
            and hooks._top_saved_tensors_default_hooks(True) is None
        ):
            hooks._push_saved_tensors_default_hooks(self.pack, self.unpack)

    @runs_outside_modes
    def unpack(self, saved: Saved) -> torch.Tensor:
        """Return what forward saved, fetched where it is needed: an entry point of [Note: Entry points].

        Weights that have changed since raise ModelError, where PyTorch raises RuntimeError by its version counters,
        which do not see the update's writes."""
        if isinstance(saved, SavedWrapper):
            self.unpack(saved.inner)
            return saved.wrapper
        if not isinstance(saved, SavedView):
            return saved
        storage = self._fault_in_saved(saved.unit_index, saved.version)
        return storage.view(saved.size, saved.stride, saved.offset, saved.dtype)
