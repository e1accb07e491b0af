"""Gather the new parameters of every rank's shards, after an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.transfer import wait_all


@final
class ShardGather:
    """Makes whole units of shards, in place, in static order: the driver calls it inside step(), once the update has
    written this rank's shards. So weights are whole between steps, and one rank alone may evaluate or save them.

    `units`: those that the update changes, all on the device. `flat_of`: a unit's flat [P].
    """

    def __init__(self, runtime: Runtime, units: Sequence[Unit], flat_of: Callable[[Unit], torch.Tensor]) -> None:
        self._collectives, self._recorder = runtime.collectives, runtime.recorder
        self._units = units
        self._flat_of = flat_of

    def gather(self) -> None:
        """Block until every unit is whole. Raises RankError."""
        with self._recorder.span("compute", "gather_ranks"):
            wait_all([self._collectives.all_gather(*self._whole_and_own(unit), unit.name) for unit in self._units])

    def _whole_and_own(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self._flat_of(unit).data  # with a version counter of its own: views that autograd saved stay valid
        shard = unit.shard(self._collectives.rank)
        return flat, flat[shard.start : shard.stop]
