"""fp32 master weights between steps: their first values, and values that users set."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.rules.state_formats import Parts
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.slots import read_slot, write_slot


class Masters:
    """Keeps one invariant: a parameter's value is its master rounded to the parameter's dtype. Driver thread."""

    def __init__(self, layouts: Sequence[StateLayout], inventory: Inventory, staging: StagingPool | None) -> None:
        self._layouts = layouts
        self._inventory = inventory
        self._staging = staging
        self._segments_of: dict[int, list[tuple[StateLayout, Segment]]] = {}
        """Unit -> its parts, in order."""
        for layout in layouts:
            for segment in layout.subgroup.segments:
                self._segments_of.setdefault(segment.unit.index, []).append((layout, segment))

    @property
    def need_params(self) -> bool:
        """Whether `follow` needs the parameters as they were."""
        return any(layout.masters.needs_params for layout in self._layouts)

    def cuts(self, unit: Unit) -> list[int]:
        """List the first element of each part of the unit that a sub-group has."""
        return [segment.unit_start for _, segment in self._segments(unit)]

    def store(self, unit: Unit, flat: torch.Tensor) -> None:
        """Store first values: `flat` [P] fp32 on the CPU."""
        for layout, segment in self._segments(unit):
            self._write(layout, segment, layout.masters.split(segment.part_of(flat)))

    def replace(self, unit: Unit, flat: torch.Tensor) -> None:
        """Set every master of the unit: `flat` [P] fp32 on the CPU. The parameters are its rounded values already."""
        for layout, segment in self._segments(unit):
            self._write(layout, segment, layout.masters.replace(self._read(layout, segment), segment.part_of(flat)))

    def follow(self, unit: Unit, flat: torch.Tensor, old: torch.Tensor | None = None) -> None:
        """Set masters that do not round to `flat` to its values: it was set by hand. `flat`: [P] of the unit's dtype,
        on the CPU. `old`: [P], what it was before, where that is needed."""
        for layout, segment in self._segments(unit):
            before = None if old is None else segment.part_of(old)
            if parts := layout.masters.follow(self._read(layout, segment), segment.part_of(flat), before):
                self._write(layout, segment, parts)

    def read(self, unit: Unit, params: torch.Tensor | None = None) -> torch.Tensor:
        """Read [P] fp32 to the CPU; zeros where no sub-group holds the unit. `params`: [P], where they are needed."""
        flat = torch.zeros(unit.numel)
        for layout, segment in self._segments(unit):
            own = None if params is None else segment.part_of(params)
            segment.part_of(flat).copy_(layout.masters.join(self._read(layout, segment), own))
        return flat

    def _read(self, layout: StateLayout, segment: Segment) -> list[torch.Tensor]:
        home = self._inventory.home(layout.subgroup, "state")
        spans = layout.master_spans(segment)
        return [read_slot(home, start, nbytes, self._staging).view(dtype) for start, nbytes, dtype in spans]

    def _write(self, layout: StateLayout, segment: Segment, parts: Parts) -> None:
        home = self._inventory.home(layout.subgroup, "state")
        for part, (start, _, _) in zip(parts, layout.master_spans(segment), strict=True):
            write_slot(home, start, part, self._staging)

    def _segments(self, unit: Unit) -> Sequence[tuple[StateLayout, Segment]]:
        return self._segments_of.get(unit.index, ())
