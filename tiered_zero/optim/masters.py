"""fp32 master weights outside of a step: their birth, and their following of a change by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tiered_zero.hardware.staging import StagingPool
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.inventory import Home, Inventory
from tiered_zero.tiers.slots import read_slot, write_slot


class Masters:
    """One invariant: a parameter's value is its master rounded to the parameter's dtype. Driver thread."""

    def __init__(self, layouts: Sequence[StateLayout], inventory: Inventory, staging: StagingPool | None) -> None:
        self._layouts = layouts
        self._inventory = inventory
        self._staging = staging

    def store(self, unit: Unit, flat: torch.Tensor) -> None:
        """First values: `flat` [P] fp32 on the CPU."""
        for home, segment in self._segments(unit):
            part = flat[segment.unit_start : segment.unit_start + segment.numel]
            write_slot(home, 4 * segment.start, part, self._staging)

    def follow(self, unit: Unit, flat: torch.Tensor) -> None:
        """`flat` [P] of the unit's dtype on the CPU was set by hand: masters that round to something else take its
        value.
        """
        for home, segment in self._segments(unit):
            new = flat[segment.unit_start : segment.unit_start + segment.numel]
            master = read_slot(home, 4 * segment.start, 4 * segment.numel, self._staging).view(torch.float32)
            changed = master.to(new.dtype) != new  # a NaN differs from everything, and is taken over
            if changed.any():
                write_slot(home, 4 * segment.start, torch.where(changed, new.to(torch.float32), master), self._staging)

    def read(self, unit: Unit) -> torch.Tensor:
        """[P] fp32 on the CPU; zeros where no sub-group holds the unit."""
        flat = torch.zeros(unit.numel)
        for home, segment in self._segments(unit):
            part = read_slot(home, 4 * segment.start, 4 * segment.numel, self._staging).view(torch.float32)
            flat[segment.unit_start : segment.unit_start + segment.numel] = part
        return flat

    def _segments(self, unit: Unit) -> Iterator[tuple[Home, Segment]]:
        for layout in self._layouts:
            for segment in layout.subgroup.segments:
                if segment.unit.index == unit.index:
                    yield self._inventory.home(layout.subgroup, "state"), segment
