"""Average gradients over ranks, inside step().

[Note: Order of sums over ranks]
A bucket is a matrix [W, n]: row r has n elements of rank r's shard of one unit. Every rank divides its own gradients by
W, and each gets the sum of its row. Which elements share a bucket depends on the model, on W and on reduce_bucket_size
alone, never on stage, tier or time: so the order of sums, and with it every bit, is the same in all of those.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.errors import RankError
from tiered_zero.grads.accumulator import GradientStore
from tiered_zero.grads.check import GradCheck, check_squares
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import FlatEntry
from tiered_zero.transfer import Transfer

SQUARES_CHUNK_NUMEL = 1 << 18
"""Elements whose squares are summed at once in fp64: 2 MiB beside the gradients, and one order of sums anywhere."""

_STEP = struct.Struct("<qq")
_NORM = struct.Struct("<dq")
_NONE_BAD = -1


@dataclass(kw_only=True)
class _Bucket:
    """One bucket under way. `memory`: [n] uint8. `packed`: its rows [W * n]; `total` [n], behind them: their sum.
    `target`: [W, n], the elements at home. `transfer`: what completes the sum."""

    memory: torch.Tensor
    packed: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor
    transfer: Transfer


@final
class GradientReducer:
    """Averages the gradients that rest at their homes, unit by unit, last unit first; driver thread.

    Afterwards each rank's shard of a unit's flat holds the average of all ranks, and `present` of every unit is that of
    all ranks together: a parameter that some rank's backward has not reached counts as zeros there. `is_sharded`: the
    other shards are left undefined; else they are gathered, and every rank has the whole average.
    """

    def __init__(
        self,
        store: GradientStore,
        units: Sequence[UnitGradients],
        runtime: Runtime,
        buckets: Sequence[torch.Tensor],
        part_numel: int,
        *,
        is_sharded: bool,
    ) -> None:
        """`units`: all that are trainable, in static order. `buckets`: their memory, [n] uint8 each. `part_numel`: of a
        row, at most."""
        self._store = store
        self._units = list(units)
        self._runtime = runtime
        self._collectives = runtime.collectives
        self._buckets = list(buckets)
        self._part_numel = part_numel
        self._is_sharded = is_sharded
        specs = {entry.param.index: entry.param for each in units for entry in each.unit.entries}
        self._names = {index: spec.name for index, spec in specs.items()}

    def check(self, micro_steps: int, global_steps: int, loss_scale: float, max_norm: float) -> GradCheck:
        """Reduce this step's gradients, and check them: every rank gets the same norm, factor and decision.

        `micro_steps`, `global_steps`: what must be the same on every rank. Raises RankError where they differ.
        """
        with self._runtime.recorder.span("compute", "reduce_ranks"):
            self._agree(micro_steps, global_steps)
            self._reduce()
            squares, bad = self._exchange_squares()
        return check_squares(squares, self._names.get(bad), loss_scale, max_norm)

    def close(self) -> None:
        """Drop the memory of gradients and buckets."""
        self._units.clear()
        self._buckets.clear()

    # -- presence ------------------------------------------------------------------------------------------------------

    def _agree(self, micro_steps: int, global_steps: int) -> None:
        """Agree with the other ranks on which parameters have a gradient, and which units are summed in fp32.

        Raises RankError where they are at different steps.
        """
        indices = [entry.param.index for each in self._units for entry in each.unit.entries]
        flags = bytes(
            [
                *(entry.param.index in each.present for each in self._units for entry in each.unit.entries),
                *(each.flat.dtype == torch.float32 for each in self._units),
            ]
        )
        found = self._collectives.exchange(_STEP.pack(micro_steps, global_steps) + flags, f"step {global_steps}")
        steps = [_STEP.unpack_from(message) for message in found]
        if len(set(steps)) > 1 or len({len(message) for message in found}) > 1:
            texts = ", ".join(
                f"rank {rank} is at step {step}, micro-batch {micro}" for rank, (micro, step) in enumerate(steps)
            )
            raise RankError(
                f"engine.step() was expected at the same micro-batch on every rank; {texts}. Give every rank the same "
                "number of batches (a distributed sampler does), and let none leave a step out."
            )
        either = [any(message[_STEP.size + place] for message in found) for place in range(len(flags))]
        present = {index for index, is_present in zip(indices, either, strict=False) if is_present}
        for each, in_fp32 in zip(self._units, either[len(indices) :], strict=True):
            if in_fp32:
                self._store.promote(each)
            absent = [entry for entry in each.unit.entries if entry.param.index in present - each.present]
            if absent:
                self._store.wait_update(each.unit)
            for entry in absent:
                each.view(entry).zero_()
                each.present.add(entry.param.index)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        under_way: deque[_Bucket] = deque()
        free = deque(self._buckets)
        for each in reversed(self._units):
            if not each.present:
                continue
            rows = each.flat.view(self._collectives.world_size, -1)
            for columns in self._columns(rows, each.flat.itemsize):
                if not free:
                    free.append(self._finish(under_way.popleft()))
                under_way.append(self._start(free.popleft(), rows[:, columns], each.unit.name))
        while under_way:
            self._finish(under_way.popleft())

    def _columns(self, rows: torch.Tensor, itemsize: int) -> Iterator[slice]:
        """Cut a unit's shards into parts that fit a bucket."""
        room = self._buckets[0].numel() // itemsize // (self._collectives.world_size + 1)
        step = min(self._part_numel, room)
        for start in range(0, rows.shape[1], step):
            yield slice(start, min(start + step, rows.shape[1]))

    def _start(self, memory: torch.Tensor, target: torch.Tensor, name: str) -> _Bucket:
        numel, part = target.numel(), target.shape[1]
        typed = memory[: (numel + part) * target.itemsize].view(target.dtype)
        packed, total = typed[:numel], typed[numel:]
        torch.div(target, self._collectives.world_size, out=packed.view(target.shape))
        transfer = self._collectives.reduce_scatter(packed, total, f"the gradients of {name}")
        if not self._is_sharded:
            transfer.wait()
            transfer = self._collectives.all_gather(packed, total, f"the gradients of {name}")
        return _Bucket(memory=memory, packed=packed, total=total, target=target, transfer=transfer)

    def _finish(self, bucket: _Bucket) -> torch.Tensor:
        """Wait for the bucket's sum and copy it to its home; return the bucket's memory."""
        bucket.transfer.wait()
        if self._is_sharded:
            bucket.target[self._collectives.rank].copy_(bucket.total)
        else:
            bucket.target.copy_(bucket.packed.view(bucket.target.shape))
        return bucket.memory

    # -- norm ----------------------------------------------------------------------------------------------------------

    def _exchange_squares(self) -> tuple[float, int]:
        """Return the sum of squares of the averaged gradients, added up in the order of ranks, and the first parameter
        with one that is not finite."""
        own, bad = 0.0, _NONE_BAD
        for each in self._units:
            for entry in each.unit.entries:
                if entry.param.index in each.present:
                    squares = self._squares(each, entry)
                    own += squares
                    if not squares < float("inf"):
                        bad = entry.param.index if bad == _NONE_BAD else min(bad, entry.param.index)
        found = [
            _NORM.unpack(message) for message in self._collectives.exchange(_NORM.pack(own, bad), "the gradient norm")
        ]
        named = [index for _, index in found if index != _NONE_BAD]
        return sum(squares for squares, _ in found), min(named, default=_NONE_BAD)

    def _squares(self, gradients: UnitGradients, entry: FlatEntry) -> float:
        """Sum the squares of a parameter's gradient over this rank's shard, in fp64."""
        shard = gradients.unit.shard(self._collectives.rank)
        total, stop = 0.0, min(entry.stop, shard.stop)
        for start in range(max(entry.start, shard.start), stop, SQUARES_CHUNK_NUMEL):
            part = gradients.flat[start : min(start + SQUARES_CHUNK_NUMEL, stop)].double()
            total += (part * part).sum().item()
        return total
