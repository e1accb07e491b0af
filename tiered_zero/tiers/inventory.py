"""Record in one table which slot holds what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Segment, SubGroup
from tiered_zero.tiers.tier import Slot, Tier
from tiered_zero.tiers.unit_update import UnitUpdate

Owner = Unit | SubGroup


@dataclass(frozen=True)
class Home:
    """A slot and its tier. `start`: the element of the owner's flat with which the slot begins; not 0 if the slot holds
    only this rank's shard."""

    tier: Tier
    slot: Slot
    start: int = 0

    def elements(self, unit: Unit) -> slice:
        """Return the elements of the unit's flat that the slot holds. The slot must be a home of the unit."""
        return slice(self.start, self.start + self.slot.nbytes // unit.itemsize)

    def offset_of(self, segment: Segment) -> int:
        """Return the byte of the slot at which the segment begins, in the unit's dtype."""
        return (segment.unit_start - self.start) * segment.unit.itemsize

    def view_of(self, segment: Segment) -> torch.Tensor | None:
        """Return a view of the segment's elements in the slot, [numel] of the unit's dtype; None if it cannot be
        addressed."""
        if (raw := self.tier.view(self.slot)) is None:
            return None
        start = self.offset_of(segment)
        return raw[start : start + segment.nbytes].view(segment.unit.dtype)


class Inventory:
    """The table of homes, (unit or sub-group, kind) -> home, and the last update of each unit. A unit without a "param"
    home rests on the device, in its own storage. Driver thread; the update thread reads too."""

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
        """Set the home of each (owner, kind)."""
        self._homes.update({(type(owner), owner.index, kind): home for (owner, kind), home in homes.items()})

    def set_last_update(self, unit: Unit, unit_update: UnitUpdate) -> None:
        """Set the unit's last update. Once that is written, the unit's home (or device storage) holds the new
        parameters."""
        self._last_updates[unit.index] = unit_update

    def last_update(self, unit: Unit) -> UnitUpdate | None:
        return self._last_updates.get(unit.index)

    def homes(self) -> Iterator[Home]:
        return iter(self._homes.values())
