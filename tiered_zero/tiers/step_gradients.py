"""The gradients of one step, from the gradient store to the update."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment


@dataclass(frozen=True, kw_only=True)
class UnitShare:
    """`flat`: the unit's gradients from element `start` of its flat on, in place: all, or a rank's shard. `present`:
    parameters (by index) that have a gradient. `last`: its landing. `on_device`: it rests on the device."""

    flat: torch.Tensor
    start: int
    present: frozenset[int]
    last: Transfer | None
    on_device: bool = False


@dataclass(frozen=True, kw_only=True)
class StepGradients:
    """Unit index -> its gradients. Filled by the driver, unit by unit, before the update reaches the unit."""

    shares: dict[int, UnitShare] = field(default_factory=dict)

    def part(self, segment: Segment) -> torch.Tensor:
        """View the gradients of a segment, [numel]."""
        share = self.shares[segment.unit.index]
        return share.flat[segment.unit_start - share.start :][: segment.numel]

    def on_device(self, unit: Unit) -> bool:
        return self.shares[unit.index].on_device

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        """Whether autograd gave this parameter a gradient in this step."""
        share = self.shares.get(unit.index)
        return share is not None and param.index in share.present

    def wait_transfers(self, unit: Unit) -> None:
        """Block until the unit's gradients are where `part` says."""
        last = self.shares[unit.index].last
        if last is not None:
            last.wait()

    def fill(self, later: StepGradients) -> None:
        """Take over from `later` the units that are not here yet."""
        for index, share in later.shares.items():
            self.shares.setdefault(index, share)
