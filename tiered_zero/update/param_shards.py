"""The masters and state of parameters of which each rank has a part: read on the ranks together, and changed on all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, final

import torch

from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.collectives import Collectives, SingleRank
from tiered_zero.layout.flat import ParamSpec, Unit

Result = TypeVar("Result")


@final
class ParamShards:
    """The ranks' shards of masters and state, of the parameters in `units` that are `trained` (by name).

    Where state is sharded every rank makes each call, in the same order, and waits for the others; else a rank may read
    alone, and all of them change values together. Driver thread.
    """

    def __init__(
        self, ranks: Collectives, units: Sequence[Unit], trained: Collection[str], *, is_sharded: bool
    ) -> None:
        self.trained = trained
        self.is_sharded = is_sharded
        self._ranks = ranks
        self._places = {entry.param.name: (unit, entry) for unit in units for entry in unit.entries}

    @property
    def readers(self) -> Collectives:
        """Those that take part in a read."""
        return self._ranks if self.is_sharded else SingleRank()

    def read(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on the readers and return this rank's result; what it raises on one is raised on all."""
        return _run(self.readers, call, act)

    def change(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on every rank and return this rank's result; what it raises on one is raised on all."""
        return _run(self._ranks, call, act)

    def spec(self, name: str) -> ParamSpec:
        """Return the parameter of that name."""
        return self._places[name][1].param

    def gather(self, param: ParamSpec, flat: torch.Tensor) -> torch.Tensor:
        """Fill `flat`, [numel] on the CPU in the order of the parameter's memory, with the readers' parts of it, and
        return it: this rank's part is there."""
        if not self.is_sharded:
            return flat
        unit, entry = self._places[param.name]
        for rank in range(self._ranks.world_size):
            shard = unit.shard(rank)
            start, stop = max(entry.start, shard.start), min(entry.stop, shard.stop)
            if start < stop:
                self._ranks.broadcast(flat[start - entry.start : stop - entry.start], rank, param.name)
        return flat

    def same(self, value: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return rank 0's `value`, of `dtype` on the CPU. It has one shape on all ranks."""
        whole = value.detach().to("cpu", dtype, copy=True)
        self._ranks.broadcast(whole, 0, "a value that is set")
        return whole

    def each(self, call: str, act: Callable[[], Result]) -> list[Result]:
        """Run `act` on every rank and return all results, JSON, in rank order; what it raises on one is raised on
        all."""
        return agree(self._ranks, call, act)


def _run(ranks: Collectives, call: str, act: Callable[[], Result]) -> Result:
    own: list[Result] = []
    agree(ranks, call, lambda: own.append(act()), encode=lambda _: None)
    return own[0]
