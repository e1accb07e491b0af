"""Hand the gradients of one step from the gradient store to the update."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.tiers.paged_flat import PagedFlat
from tiered_zero.tiers.tier import BufferView


@dataclass(frozen=True, kw_only=True)
class UnitShare:
    """One unit's gradients in a step. `flat`: the gradients from element `start` of the unit's flat, in place: all, or
    a rank's shard. `present`: indices of parameters with a gradient. `last`: the transfer that completes last.
    `on_device`: `flat` is on the device. `paged`: set if the home is NVMe; `flat` is then empty."""

    flat: torch.Tensor
    start: int
    present: frozenset[int]
    last: Transfer | None
    on_device: bool = False
    paged: PagedFlat | None = None


@dataclass(frozen=True, kw_only=True)
class StepGradients:
    """The gradients of one step, by unit index. The driver adds each unit before the update reaches it."""

    shares: dict[int, UnitShare] = field(default_factory=dict)

    def part(self, segment: Segment) -> torch.Tensor:
        """Return a view of the gradients of a segment, [numel], which must rest in memory."""
        share = self.shares[segment.unit.index]
        return share.flat[segment.unit_start - share.start :][: segment.numel]

    def on_device(self, unit: Unit) -> bool:
        return self.shares[unit.index].on_device

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        """Return whether the parameter has a gradient in this step."""
        share = self.shares.get(unit.index)
        return share is not None and param.index in share.present

    def has_arrived(self, unit: Unit) -> bool:
        """Return whether `wait_transfers` would return at once."""
        last = self.shares[unit.index].last
        return last is None or last.done()

    def wait_transfers(self, unit: Unit) -> None:
        """Block until the unit's gradients are readable by `part`."""
        last = self.shares[unit.index].last
        if last is None:
            return
        with ExitStack() as stack:
            if not last.done():
                for windows in {share.paged.windows for share in list(self.shares.values()) if share.paged is not None}:
                    stack.enter_context(windows.awaited())
            last.wait()

    def read_part(self, segment: Segment, out: BufferView) -> Transfer | None:
        """Start to read the gradients of a segment from NVMe into all of `out`. Return None if they are not there."""
        share = self.shares.get(segment.unit.index)
        if share is None or share.paged is None:
            return None
        offset = (segment.unit_start - share.start) * share.paged.dtype.itemsize
        return share.paged.windows.read(share.paged, offset, out)

    def release(self, unit: Unit) -> None:
        """Free the memory of the unit's gradients from NVMe: its update is computed."""
        share = self.shares.get(unit.index)
        if share is not None and share.paged is not None:
            share.paged.windows.drop(share.paged)

    def release_all(self) -> None:
        """Free the memory of all gradients from NVMe: the update has ended or failed."""
        for share in list(self.shares.values()):
            if share.paged is not None:
                share.paged.windows.drop(share.paged)

    def fill(self, later: StepGradients) -> None:
        """Add from `later` the units that are not here yet."""
        for index, share in later.shares.items():
            self.shares.setdefault(index, share)
