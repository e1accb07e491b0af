"""The one table of what rests where."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tiered_zero.hardware.accelerator import Event
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import SubGroup
from tiered_zero.tiers.tier import Slot, Tier

Owner = Unit | SubGroup


@dataclass(frozen=True)
class Home:
    """A slot and the tier that it lies in."""

    tier: Tier
    slot: Slot


class Publication(Event):
    """One unit's update on its way: complete once its parameters are where everybody reads them. Any thread."""

    def __init__(self) -> None:
        self._complete = threading.Event()
        self._error: BaseException | None = None

    def complete(self) -> None:
        self._complete.set()

    def fail(self, error: BaseException) -> None:
        """The update broke off: whoever waits gets the error. Does nothing once complete."""
        if not self._complete.is_set():
            self._error = error
            self._complete.set()

    def done(self) -> bool:
        return self._complete.is_set()

    def wait(self) -> None:
        self._complete.wait()
        if self._error is not None:
            raise self._error


class Inventory:
    """(unit or sub-group, kind) -> home, and for each unit the event after which its parameters are those of the last
    update.

    A unit without a "param" home rests on the device, in its own storage. Driver thread; reads also from the update
    thread.
    """

    def __init__(self) -> None:
        self._homes: dict[tuple[type, int, str], Home] = {}
        self._published: dict[int, Event] = {}

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

    def swap(self, owner: Owner, kind: str, other: str) -> None:
        """Exchange two homes: what was written behind the scenes becomes what is read."""
        first, second = (type(owner), owner.index, kind), (type(owner), owner.index, other)
        self._homes[first], self._homes[second] = self._homes[second], self._homes[first]

    def publish(self, unit: Unit, event: Event) -> None:
        """From `event` on, the unit's home (or its storage on the device) holds the updated parameters."""
        self._published[unit.index] = event

    def published(self, unit: Unit) -> Event | None:
        return self._published.get(unit.index)

    def homes(self) -> Iterator[Home]:
        return iter(self._homes.values())
