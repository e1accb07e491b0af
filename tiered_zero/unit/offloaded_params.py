"""Reads and writes of whole units at their homes, as plain CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from tiered_zero.hardware.device.outside_modes import runs_outside_modes
from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.hardware.ranks.collectives import Collectives, SingleRank
from tiered_zero.layout.flat import Unit
from tiered_zero.tiers.inventory import Inventory, read_slot, write_slot


@dataclass(eq=False, repr=False)
class OffloadedParams:
    """Reads and writes a unit's parameters at their home. Driver thread; blocks. Where a home holds a shard, every rank
    makes the same calls.

    `_on_change(unit, flat, old)`: what is derived from the parameters (the fp32 masters) must follow `flat` [P], on the
    CPU. `_cuts(unit)`: where masters are made of parameters, the first elements of the parts in which the update reads
    them; they are written in the same parts, which is how their reads are verified, and `_on_change` is given `old`.
    """

    _inventory: Inventory
    _staging: StagingPool | None
    _on_change: Callable[[Unit, torch.Tensor, torch.Tensor | None], None]
    _cuts: Callable[[Unit], Sequence[int]] | None = None
    _ranks: Collectives = field(default_factory=SingleRank)

    def is_part(self, unit: Unit) -> bool:
        """Whether the unit's home holds this rank's shard of it."""
        home = self._inventory.find(unit, "param")
        return home is not None and home.slot.nbytes < unit.nbytes

    def read(self, unit: Unit) -> torch.Tensor:
        """Read the unit, which has a home: [P] of its dtype, a CPU tensor of the caller's own."""
        own = self._read_home(unit)
        flat = own if own.numel() == unit.numel else torch.empty(unit.numel, dtype=unit.dtype)
        if flat is not own:
            self._ranks.all_gather(flat, own, f"unit {unit.name}", order=f"a copy of {unit.name}").wait()
        return flat

    def read_own(self, unit: Unit) -> torch.Tensor:
        """Read what this rank has of the unit, which has a home: [P] of its dtype, the other elements undefined."""
        own, elements = self._read_home(unit), self._inventory.home(unit, "param").elements(unit)
        if own.numel() == unit.numel:
            return own
        flat = torch.empty(unit.numel, dtype=unit.dtype)
        flat[elements] = own
        return flat

    def _read_home(self, unit: Unit) -> torch.Tensor:
        home = self._inventory.home(unit, "param")
        return read_slot(home, 0, home.slot.nbytes, self._staging).view(unit.dtype)

    def store(self, unit: Unit, flat: torch.Tensor) -> None:
        """Write `flat`, [P] of the unit's dtype on the CPU, to the unit's home: all of it, or this rank's shard."""
        home = self._inventory.home(unit, "param")
        own = home.elements(unit)
        starts = sorted({own.start, *(self._cuts(unit) if self._cuts is not None else ())})
        for start, stop in pairwise([*starts, own.stop]):
            write_slot(home, (start - own.start) * unit.itemsize, flat[start:stop], self._staging)

    @runs_outside_modes
    def remember(self, unit: Unit, flat: torch.Tensor) -> torch.Tensor | None:
        """Copy `flat` [P], on the device, to the CPU before it is changed, where `change` needs it as `old`."""
        return flat.to("cpu", copy=True) if self._cuts is not None and unit.trainable else None

    def change(self, unit: Unit, flat: torch.Tensor, old: torch.Tensor | None) -> None:
        """Make `flat` [P], on the device or the CPU, the unit's value; masters follow if it differs.

        Call `TrainStep.before_weights_write` before: no update may run, nor may its state be prefetched.
        """
        value = flat.to("cpu")
        if self._inventory.find(unit, "param") is not None:
            self.store(unit, value)
        self._on_change(unit, value, old)
