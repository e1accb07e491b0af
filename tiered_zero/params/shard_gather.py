"""Gather the new parameters of every rank's shards, after their update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.transfer import Transfer, wait_all


@final
class ShardGather:
    """Makes whole units of shards, in place: so weights are whole between steps, and one rank alone may evaluate or
    save them. Driver thread.

    A unit is gathered where it rests, without memory beside it however large it is. `units`: those that the optimizer
    steps, in static order. `flat_of`: a unit's flat [P], on the device.
    """

    def __init__(self, runtime: Runtime, units: Sequence[Unit], flat_of: Callable[[Unit], torch.Tensor]) -> None:
        self._collectives, self._recorder = runtime.collectives, runtime.recorder
        self.units = units
        self._flat_of = flat_of

    def gather(self) -> None:
        """Gather every unit: shards were changed otherwise than by a step. Blocks; raises RankError."""
        with self._recorder.span("compute", "wait_param"):
            wait_all([self.start(unit) for unit in self.units])

    def start(self, unit: Unit) -> Transfer:
        """Start to fill the unit with every rank's shard, of which this rank's has its new values."""
        flat = self._flat_of(unit).data  # with a version counter of its own: views that autograd saved stay valid
        shard = unit.shard(self._collectives.rank)
        own, name = flat[shard.start : shard.stop], f"the parameters of {unit.name}"
        return self._collectives.all_gather(flat, own, name, bounds=unit.bounds)
