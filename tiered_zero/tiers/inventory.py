"""The one table of what rests where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import SubGroup
from tiered_zero.tiers.tier import Slot, Tier
from tiered_zero.tiers.unit_update import UnitUpdate

Owner = Unit | SubGroup


@dataclass(frozen=True)
class Home:
    """A slot and its tier. `start`: which element of the owner's flat the slot begins with; 0 at one rank."""

    tier: Tier
    slot: Slot
    start: int = 0


class Inventory:
    """(unit or sub-group, kind) -> home, and the last update of each unit.

    A unit without a "param" home rests on the device, in its own storage. Driver thread; reads also from the update
    thread.
    """

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
        home = self.find(owner, kind)
        assert home is not None, f"nothing rests as {kind} of {owner}"
        return home

    def move(self, homes: Mapping[tuple[Owner, str], Home]) -> None:
        """Set the home of each (owner, kind), all at once, so that an interrupt cannot separate them."""
        self._homes.update({(type(owner), owner.index, kind): home for (owner, kind), home in homes.items()})

    def set_last_update(self, unit: Unit, unit_update: UnitUpdate) -> None:
        """Set the unit's last update: once it is written, its home (or device storage) holds the new parameters."""
        self._last_updates[unit.index] = unit_update

    def last_update(self, unit: Unit) -> UnitUpdate | None:
        return self._last_updates.get(unit.index)

    def homes(self) -> Iterator[Home]:
        return iter(self._homes.values())
