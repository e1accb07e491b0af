"""Places of gradients and parameters for an update: two protocols, and the parameters of an engine's units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.tier import BufferView, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate


class GradientSource(Protocol):
    """The gradients of one step. `StepGradients` has those that an engine has gathered. Any one thread at a time."""

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        """Return whether the parameter has a gradient in this step."""

    def has_arrived(self, unit: Unit) -> bool:
        """Return whether `wait_transfers` would return at once."""

    def wait_transfers(self, unit: Unit) -> None:
        """Block until the unit's gradients are where `part` says."""

    def on_device(self, unit: Unit) -> bool:
        """Return whether `part` lies on the device."""

    def part(self, segment: Segment) -> torch.Tensor:
        """View the gradients of a segment, [numel]; undefined where a parameter has none."""

    def read_part(self, segment: Segment, out: BufferView) -> Transfer | None:
        """Start to read the gradients of a segment, which rest on NVMe, to all of `out`; None where there are none."""

    def release(self, unit: Unit) -> None:
        """The unit's update is computed."""

    def release_all(self) -> None:
        """The update is over, well or badly."""


class ParameterSink(Protocol):
    """The parameters that an update writes, segment by segment. The thread that steps.

    `kind`: which values: "param", or "param_back" of a delayed update.
    """

    def is_resident(self, segment: Segment) -> bool:
        """Return whether the parameters rest on the device, where they outlive the run."""

    def view(self, segment: Segment, kind: str, *, on_device: bool) -> torch.Tensor | None:
        """View the parameters where an update there can write them in place, [numel] of the unit's dtype; None where
        they pass through a staging buffer."""

    def read(self, segment: Segment, kind: str, window: BufferView | None) -> Transfer | None:
        """Start to copy the present values to `window`, or, where that is None, to the view of `kind`. None where they
        are there already."""

    def write(
        self, segment: Segment, kind: str, window: BufferView, after: Transfer, unit_update: UnitUpdate | None
    ) -> tuple[Transfer, int | None]:
        """Start to write new values, which are in host memory, to where they rest. Returns the transfer, and the offset
        of the bytes that `unit_update` forwards until it is done. `after`: compute's mark: what may still read the
        parameters."""


@dataclass(eq=False, repr=False)
class UnitParameters:
    """The parameters of an engine's units: in their homes, or in the flats of units that live on the device.

    `_device_flat`: the flat of such a unit.
    """

    _inventory: Inventory
    _runtime: Runtime
    _device_flat: Callable[[Unit], torch.Tensor]

    def is_resident(self, segment: Segment) -> bool:
        return self._inventory.find(segment.unit, "param") is None

    def view(self, segment: Segment, kind: str, *, on_device: bool) -> torch.Tensor | None:
        home = self._inventory.find(segment.unit, kind)
        if home is None:
            return segment.part_of(self._device_flat(segment.unit)) if on_device else None
        return home.view_of(segment) if on_device == (home.tier.name == "device") else None

    def read(self, segment: Segment, kind: str, window: BufferView | None) -> Transfer | None:
        home = self._inventory.find(segment.unit, "param")
        if home is None:
            return None  # on the device, and updated there
        if window is not None:
            return home.tier.read(home.slot, window, home.offset_of(segment))
        if kind != "param":
            target = self._inventory.home(segment.unit, kind)
            old, new = home.view_of(segment), target.view_of(segment)
            assert old is not None and new is not None, "both homes of a unit are on one tier"
            new.copy_(old)
        return None

    def write(
        self, segment: Segment, kind: str, window: BufferView, after: Transfer, unit_update: UnitUpdate | None
    ) -> tuple[Transfer, int | None]:
        accelerator = self._runtime.accelerator
        home = self._inventory.find(segment.unit, kind)
        if home is not None:
            offset = home.offset_of(segment)
            written = home.tier.write(home.slot, window, offset, after)
            if unit_update is None:
                return written, None
            unit_update.add_pending(offset, window.tensor)
            return written, offset
        target = as_bytes(segment.part_of(self._device_flat(segment.unit)))
        copy = accelerator.lane("write_back").submit(
            lambda: accelerator.copy(target, window.tensor), after=[after], holds=[target]
        )
        return copy, None
