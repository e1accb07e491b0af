"""Allocate host memory: one block of exactly the planned size, from which named slots are taken."""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.errors import BudgetError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.probe import near_cpus
from tiered_zero.layout.extents import ExtentMap
from tiered_zero.native.update import available_cpus
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.system import map_memory, touch_pages
from tiered_zero.telemetry.spans import Ledger

_MAPPED_NBYTES = 128 * 1024
"""The least bytes for a separate mapping. malloc, too, uses one from this size on, until the first of them is freed."""


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostSlot:
    """Whole pages of the arena. `nbytes`: the requested size, rounded up to a page. `tensor`: [nbytes] uint8. `memory`:
    the bytes of `tensor`, for the I/O engines.
    """

    offset: int
    nbytes: int
    kind: str
    tensor: torch.Tensor
    memory: memoryview
    _arena: HostArena

    def release(self) -> None:
        """Free the bytes; call it once. The caller keeps no view of them: the next slot may get these bytes."""
        self._arena._release(self)


def trim_malloc() -> None:
    """Return malloc's free heap memory to the system; glibc only. Takes a few milliseconds. glibc raises its threshold
    for separate mappings to the largest block freed, so a unit's initial values, freed before the next unit's are made,
    leave holes of up to 32 MiB each in the heap."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def temporary_zeros(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU for temporary use; large ones in a separate mapping. Values allocated and freed one after
    another, with small blocks left in between, make malloc's heap grow by their sum; later allocations in the holes
    make it resident, up to all of it."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MAPPED_NBYTES:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(map_memory(nbytes), dtype=dtype).view(shape)


def typed_view(raw: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return the first bytes of `raw`, [n] uint8, as [numel] of `dtype`. Raises BudgetError if they are too few."""
    nbytes = numel * dtype.itemsize
    if nbytes > raw.numel():
        raise BudgetError(f"{numel} elements of {dtype} need {nbytes} bytes; this memory has {raw.numel()}")
    return raw[:nbytes].view(dtype)


UNPINNED_KINDS = frozenset({"state", "commit", "commit_param", "commit_copy", "bucket"})
"""Kinds of slots whose bytes never cross to the device, and are not pinned: the CPU updates state in place."""


@final
class HostArena:
    """The host memory of a run: one anonymous, page-aligned mapping. Its slots are pinned if that is asked for and
    possible. Any thread.

    Torch's pinned allocator rounds sizes up to powers of two; the arena takes exactly the pages asked for. Slots are
    pinned one by one: if one cannot be pinned, the others are. Slots of UNPINNED_KINDS, most of the bytes, are not
    pinned.
    """

    def __init__(self, capacity_nbytes: int, accelerator: Accelerator, pin: bool, ledger: Ledger) -> None:
        self._extents = ExtentMap(max(capacity_nbytes, 1))
        self.capacity_nbytes = self._extents.capacity_nbytes
        self._accelerator = accelerator
        self._ledger = ledger
        self._lock = threading.Lock()
        self._taken: dict[int, HostSlot] = {}
        self._closed = False
        # not inherited by forked children: a child's copy-on-write would replace pages under a direct transfer in
        # flight (open(2), O_DIRECT notes)
        mapping = map_memory(self.capacity_nbytes, "MADV_DONTFORK", "MADV_HUGEPAGE")
        self._memory, self._tensor = memoryview(mapping), torch.frombuffer(mapping, dtype=torch.uint8)
        self._pin = pin
        self._near_cpus = near_cpus(accelerator.device) if pin else set()
        self._pinned: dict[int, int] = {}
        """Offset -> bytes of each pinned slot."""
        self.poison(self._tensor)

    @property
    def pinned_nbytes(self) -> int:
        """The number of bytes that the device can copy directly."""
        return sum(self._pinned.values())

    def take(self, nbytes: int, kind: str) -> HostSlot:
        """Return a slot of at least `nbytes`, of undefined content, at the first place that has room. `kind`: the name
        under which the ledger counts the bytes. Raises BudgetError."""
        size = align_up(max(nbytes, 1), PAGE_NBYTES)
        with self._lock:
            offset = self._extents.allocate(size)
            if offset is None:
                raise BudgetError(
                    f"{kind} needs {format_nbytes(size)} of the host arena; {self._extents.describe()}. This run has "
                    "left its plan."
                )
            try:
                self._ledger.charge("host", kind, size)
            except BudgetError:
                self._extents.free(offset, size)
                raise
            end = offset + size
            tensor, memory = self._tensor[offset:end], self._memory[offset:end]
            slot = HostSlot(offset=offset, nbytes=size, kind=kind, tensor=tensor, memory=memory, _arena=self)
            self._taken[offset] = slot
            if self._pin and kind not in UNPINNED_KINDS:
                touch_pages(tensor.data_ptr(), size, available_cpus(), self._near_cpus)
                if self._accelerator.pin(tensor.data_ptr(), size):
                    self._pinned[offset] = size
        return slot

    def _release(self, slot: HostSlot) -> None:
        with self._lock:
            if self._closed:
                return
            if self._taken.get(slot.offset) is not slot:
                raise RuntimeError(f"the {slot.kind} slot at offset {slot.offset} was released before")
            self.poison(slot.tensor)
            del self._taken[slot.offset]
            if self._pinned.pop(slot.offset, 0):
                self._accelerator.unpin(slot.tensor.data_ptr())
            self._extents.free(slot.offset, slot.nbytes)
            self._ledger.discharge("host", slot.kind, slot.nbytes)

    def poison(self, pages: torch.Tensor) -> None:
        """In debug mode overwrite whole pages, [n] uint8: NaN in fp32, and in every other 16-bit float."""
        self._accelerator.poison(pages, torch.float32)

    def close(self) -> None:
        """Unpin the memory; it is freed with the last view of it. Idempotent. A tensor or memoryview that outlives the
        arena stays valid (it holds the mapping), but is no longer pinned."""
        with self._lock:
            self._closed = True
            for slot in self._taken.values():
                self._ledger.discharge("host", slot.kind, slot.nbytes)
            self._taken.clear()
            for offset in self._pinned:
                self._accelerator.unpin(self._tensor[offset:].data_ptr())
            self._pinned.clear()
            self._tensor, self._memory = torch.empty(0, dtype=torch.uint8), memoryview(b"")
