"""Cut the gradients of units into buckets. Ranks reduce each bucket in one collective.

[Note: Order of sums over ranks] A bucket has one row for each rank, with elements of that rank's shards. Each rank
receives its row from every rank, and adds these in rank order. So sums do not depend on how units and buckets are cut,
and fp32 averages equal those of a loop over the ranks. If ranks keep whole gradients, micro-batches are summed before
the reduction; if they keep shards, after it. A 16-bit bucket is summed in fp32 if one of its units has gradients of
several backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from tiered_zero.layout.flat import Unit

SHARED_NUMEL = 1 << 18
"""Units share a bucket until it has this many elements, 1 MiB of fp32. Smaller collectives are bound by latency; a
larger bucket would keep the gradients of many units waiting."""


@dataclass(frozen=True, kw_only=True)
class BucketPart:
    """The elements of one unit in a bucket. `spans`: for each rank, its range of the unit's flat. `starts`: where each
    of these ranges begins in the bucket. `is_first`, `is_last`: whether this is the unit's first or last part."""

    unit: Unit
    spans: tuple[range, ...]
    starts: tuple[int, ...]
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The gradients of parts of units, in one dtype, as one 1-D array. Rank r's row, its share of the elements, is
    `bounds[r]` to `bounds[r + 1]`."""

    parts: tuple[BucketPart, ...]
    bounds: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.bounds[-1]

    def row(self, rank: int) -> range:
        return range(self.bounds[rank], self.bounds[rank + 1])

    @cached_property
    def units(self) -> frozenset[Unit]:
        """The units in the bucket."""
        return frozenset(part.unit for part in self.parts)

    def nbytes(self, itemsize: int) -> int:
        """Return the bytes of the bucket and of the buffer after it in memory, which receives rows from other ranks."""
        row_numel = max(stop - start for start, stop in pairwise(self.bounds))
        num_others = len(self.bounds) - 2
        # the rows of all others up to SHARED_NUMEL elements, and at least one row
        room_numel = max(num_others, row_numel, min(num_others * row_numel, SHARED_NUMEL))
        return (self.numel + room_numel) * itemsize


def cut_buckets(units: Sequence[Unit], world_size: int, bucket_numel: int) -> list[Bucket]:
    """Cut the gradients of trainable units into buckets of at most about `bucket_numel` elements, last unit first.
    `units`: in the order of a forward."""
    row_numel = max(1, bucket_numel // world_size)
    shared_numel = min(row_numel, max(1, SHARED_NUMEL // world_size))
    buckets: list[Bucket] = []
    columns: list[tuple[Unit, range, bool]] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if columns:
            buckets.append(_bucket(columns, world_size))
        columns.clear()
        filled = 0

    for unit in reversed(units):  # backward completes the last unit first
        if columns and columns[-1][0].dtype != unit.dtype:
            close()
        shard_numel = max(len(unit.shard(rank)) for rank in range(world_size))
        for start in range(0, shard_numel, row_numel):
            stop = min(start + row_numel, shard_numel)
            if filled + stop - start > row_numel:
                close()
            columns.append((unit, range(start, stop), stop == shard_numel))
            filled += stop - start
            if filled >= shared_numel:
                close()
    close()
    return buckets


def _bucket(columns: Sequence[tuple[Unit, range, bool]], world_size: int) -> Bucket:
    """Build a bucket. `columns`: for each part its unit, the range of elements that it takes from every rank's shard,
    and whether it is the unit's last part."""
    ranks = range(world_size)
    spans = [[unit.shard(rank)[part.start : part.stop] for rank in ranks] for unit, part, _ in columns]
    bounds = tuple(accumulate((sum(len(own[rank]) for own in spans) for rank in ranks), initial=0))
    position = list(bounds[:-1])
    parts = []
    for (unit, column, is_last), own in zip(columns, spans, strict=True):
        is_first = column.start == 0
        parts.append(
            BucketPart(unit=unit, spans=tuple(own), starts=tuple(position), is_first=is_first, is_last=is_last)
        )
        position = [start + len(span) for start, span in zip(position, own, strict=True)]
    return Bucket(parts=tuple(parts), bounds=bounds)
