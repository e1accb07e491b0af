"""The gradients of one step, from the gradient store to the update."""

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
    """`flat`: the unit's gradients from element `start` of its flat on, in place: all, or a rank's shard. `present`:
    parameters (by index) that have a gradient. `last`: its landing. `on_device`: it rests on the device. `paged`: its
    home is NVMe, and `flat` is empty."""

    flat: torch.Tensor
    start: int
    present: frozenset[int]
    last: Transfer | None
    on_device: bool = False
    paged: PagedFlat | None = None


@dataclass(frozen=True, kw_only=True)
class StepGradients:
    """Unit index -> its gradients. Filled by the driver, unit by unit, before the update reaches the unit."""

    shares: dict[int, UnitShare] = field(default_factory=dict)

    def part(self, segment: Segment) -> torch.Tensor:
        """View the gradients of a segment, [numel], which rest in memory."""
        share = self.shares[segment.unit.index]
        return share.flat[segment.unit_start - share.start :][: segment.numel]

    def on_device(self, unit: Unit) -> bool:
        return self.shares[unit.index].on_device

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        """Whether autograd gave this parameter a gradient in this step."""
        share = self.shares.get(unit.index)
        return share is not None and param.index in share.present

    def has_arrived(self, unit: Unit) -> bool:
        """Whether `wait_transfers` would return at once."""
        last = self.shares[unit.index].last
        return last is None or last.done()

    def wait_transfers(self, unit: Unit) -> None:
        """Block until the unit's gradients are where `part` says."""
        last = self.shares[unit.index].last
        if last is None:
            return
        with ExitStack() as stack:
            if not last.done():
                for windows in {share.paged.windows for share in list(self.shares.values()) if share.paged is not None}:
                    stack.enter_context(windows.awaited())
            last.wait()

    def read_part(self, segment: Segment, out: BufferView) -> Transfer | None:
        """Gradients of a segment that rest on NVMe -> all of `out`; None where there are none."""
        share = self.shares.get(segment.unit.index)
        if share is None or share.paged is None:
            return None
        offset = (segment.unit_start - share.start) * share.paged.dtype.itemsize
        return share.paged.windows.read(share.paged, offset, out)

    def release(self, unit: Unit) -> None:
        """The unit's update is computed: free the memory that its gradients from NVMe are in."""
        share = self.shares.get(unit.index)
        if share is not None and share.paged is not None:
            share.paged.windows.drop(share.paged)

    def release_all(self) -> None:
        """The update is over, well or badly."""
        for share in list(self.shares.values()):
            if share.paged is not None:
                share.paged.windows.drop(share.paged)

    def fill(self, later: StepGradients) -> None:
        """Take over from `later` the units that are not here yet."""
        for index, share in later.shares.items():
            self.shares.setdefault(index, share)
