"""Record in one table which slot holds what, and copy plain CPU tensors to and from slots.

The copies serve initial values, state_dict and changes by user code. They are slow: they block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Segment, SubGroup
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.tiers.tier import BufferView, Slot, Tier, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate

Owner = Unit | SubGroup


@dataclass(frozen=True)
class Home:
    """A slot and its tier. `start`: the element of the owner's flat with which the slot begins. The owner is a unit or
    a sub-group. `start` is not 0 if the slot holds only this rank's shard."""

    tier: Tier
    slot: Slot
    start: int = 0

    def elements(self, unit: Unit) -> slice:
        """Return the elements of the unit's flat that the slot holds. The slot must be a home of the unit."""
        return slice(self.start, self.start + self.slot.nbytes // unit.itemsize)

    def offset_of(self, segment: Segment) -> int:
        """Return the first byte of the segment in the slot, which holds the unit's dtype."""
        return (segment.unit_start - self.start) * segment.unit.itemsize

    def view_of(self, segment: Segment) -> torch.Tensor | None:
        """Return a view of the segment's elements in the slot, [numel] of the unit's dtype; None if memory cannot
        address the slot."""
        if (raw := self.tier.view(self.slot)) is None:
            return None
        start = (segment.unit_start - self.start) * segment.unit.itemsize
        return raw[start : start + segment.nbytes].view(segment.unit.dtype)


class Inventory:
    """The table of homes, (unit or sub-group, kind) -> home, and the last update of each unit. A unit without a "param"
    home rests on the device, in its own storage. Driver thread; the update thread reads the table too."""

    def __init__(self) -> None:
        self._homes: dict[tuple[type, int, str], Home] = {}
        self._last_updates: dict[int, UnitUpdate] = {}

    def place(self, owner: Owner, kind: str, home: Home) -> None:
        key = (type(owner), owner.index, kind)
        assert key not in self._homes, f"{key} has a home already"
        self._homes[key] = home

    def find(self, owner: Owner, kind: str) -> Home | None:
        return self._homes.get((type(owner), owner.index, kind))

    def home(self, owner: Owner, kind: str) -> Home:
        home = self._homes.get((type(owner), owner.index, kind))
        assert home is not None, f"nothing rests as {kind} of {owner}"
        return home

    def move(self, homes: Mapping[tuple[Owner, str], Home]) -> None:
        """Set new homes. `homes`: (owner, kind) -> its home from now on."""
        self._homes.update({(type(owner), owner.index, kind): home for (owner, kind), home in homes.items()})

    def set_last_update(self, unit: Unit, unit_update: UnitUpdate) -> None:
        """Set the unit's last update. Once the update is written, the unit's home (or its storage on the device) holds
        the new parameters."""
        self._last_updates[unit.index] = unit_update

    def last_update(self, unit: Unit) -> UnitUpdate | None:
        return self._last_updates.get(unit.index)

    def homes(self) -> Iterator[Home]:
        return iter(self._homes.values())


# -- plain tensors, to and from slots ----------------------------------------------------------------------------------


def read_slot(home: Home, offset: int, nbytes: int, staging: StagingPool | None) -> torch.Tensor:
    """Return `nbytes` of the slot's bytes from `offset`, [nbytes] uint8 on the CPU. They pass through a buffer of
    `staging` if memory cannot address the slot."""
    view = home.tier.view(home.slot)
    if view is not None:
        return view[offset : offset + nbytes].to("cpu", copy=True)
    assert staging is not None, "a tier without views is planned with staging buffers"
    out, at, end = torch.empty(nbytes, dtype=torch.uint8), offset, offset + nbytes
    while at < end:
        exact = range(at, min(at + staging.buffer_nbytes, align_up(end, PAGE_NBYTES)))
        window = _verified_window(home, exact, staging.buffer_nbytes)
        try:
            found = _read(home, window, staging)[at - window.start :]
        except CorruptionError:
            raise
        except StoreError:  # bytes around the wanted ones were never written
            found = _read(home, exact, staging)
        part = out[at - offset :][: found.numel()]
        part.copy_(found[: part.numel()])
        at += part.numel()
    return out


def _verified_window(home: Home, wanted: range, buffer_nbytes: int) -> range:
    """Extend the range `wanted` to whole checksum chunks, if the buffer can hold them: a part of a chunk cannot be
    verified."""
    start = wanted.start // MIB * MIB
    stop = min(align_up(wanted.stop, MIB), home.slot.nbytes)
    if stop - start > buffer_nbytes:
        stop = (start + buffer_nbytes) // MIB * MIB
    return range(start, stop) if stop > wanted.start else wanted


def _read(home: Home, window: range, staging: StagingPool) -> torch.Tensor:
    with staging.lease(len(window), home.slot.name) as lease:
        home.tier.read(home.slot, lease, window.start).wait()
        return lease.tensor.clone()


def write_slot(home: Home, offset: int, data: torch.Tensor, staging: StagingPool | None) -> None:
    """Write `data`, a contiguous tensor of whole pages, to the slot's bytes from `offset`."""
    raw = as_bytes(data)
    view = home.tier.view(home.slot)
    if view is not None:
        view[offset : offset + raw.numel()].copy_(raw)
        return
    assert staging is not None, "a tier without views is planned with staging buffers"
    for start in range(0, raw.numel(), staging.buffer_nbytes):
        part = raw[start : start + staging.buffer_nbytes]
        with staging.lease(part.numel(), home.slot.name) as lease:
            lease.tensor.copy_(part)
            home.tier.write(home.slot, lease, offset + start).wait()


@contextmanager
def leased_slot(
    home: Home, staging: StagingPool | None, read: slice, write: slice | None = None
) -> Iterator[torch.Tensor]:
    """Lend a slot's bytes, [nbytes] uint8, inside the block: in place, possibly on the device, or in a staging buffer.

    `read`: the bytes (from, to, in whole pages) that are read into the staging buffer before the block. `write`: the
    bytes that are written back from there after it. Both are ignored if the slot is lent in place."""
    view = home.tier.view(home.slot)
    if view is not None:
        yield view
        return
    assert staging is not None, "a tier without views is planned with staging buffers"
    with staging.lease(home.slot.nbytes, home.slot.name) as lease:
        if read.start < read.stop:
            home.tier.read(home.slot, BufferView(lease.tensor[read], lease.memory[read]), read.start).wait()
        yield lease.tensor
        if write is not None and write.start < write.stop:
            home.tier.write(home.slot, BufferView(lease.tensor[write], lease.memory[write]), write.start).wait()
