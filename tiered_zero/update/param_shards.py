"""Read masters and state that are split over ranks, and change them on all ranks together."""

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
    """The ranks' shards of masters and state, for the parameters in `units` whose names are in `trained`.

    If state is sharded, every rank makes each call in the same order and waits for the others. Otherwise a rank may
    read alone, and changes are still made on all ranks together. Driver thread.
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
        """The ranks that take part in a read: all if state is sharded, else this one."""
        return self._ranks if self.is_sharded else SingleRank()

    def read(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on the readers and return this rank's result; an error on one rank is raised on all."""
        return _run(self.readers, call, act)

    def change(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on every rank and return this rank's result; an error on one rank is raised on all."""
        return _run(self._ranks, call, act)

    def spec(self, name: str) -> ParamSpec:
        """Return the spec of the parameter called `name`."""
        return self._places[name][1].param

    def gather(self, param: ParamSpec, flat: torch.Tensor) -> torch.Tensor:
        """Fill `flat` with the other ranks' parts of the parameter, and return it. It holds this rank's part: [numel]
        on the CPU, in the parameter's memory order."""
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
        """Return rank 0's `value`, as `dtype` on the CPU. Its shape is the same on all ranks."""
        whole = value.detach().to("cpu", dtype, copy=True)
        self._ranks.broadcast(whole, 0, "a value that is set")
        return whole

    def each(self, call: str, act: Callable[[], Result]) -> list[Result]:
        """Run `act` on every rank and return all results, which are JSON, in rank order; an error on one is raised on
        all."""
        return agree(self._ranks, call, act)


def _run(ranks: Collectives, call: str, act: Callable[[], Result]) -> Result:
    own: list[Result] = []
    agree(ranks, call, lambda: own.append(act()), encode=lambda _: None)
    return own[0]
