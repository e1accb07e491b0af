"""Gather and reduce host memory over gloo, on a lane of `ProcessGroups`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tiered_zero.hardware.ranks.rank_order import add_in_order


def gather(rows: Sequence[torch.Tensor], shard: torch.Tensor, rank: int, part_numel: int, group: Any) -> None:
    """Fill `rows` with all ranks' shards, at most `part_numel` elements of each at once. `shard`: this rank's; it may
    be its row.

    [Note: Collectives by owner] A gather is a broadcast of each rank's shard; a reduction is a message of each part to
    the rank that owns it, which adds them in rank order. All messages of a call are under way at once. Parts may differ
    in size, move without copies, and need as many bytes as a ring. gloo's all_gather and reduce_scatter first copy
    everything: for 64 MiB at 4 ranks on one host the gather took 235 ms and 64 MiB more, the broadcasts 58 ms and
    nothing. gloo's reduce adds in an order that depends on an element's place in the tensor, and took 2 to 8 times the
    processor time for 1 MiB at 2 to 4 ranks, and 1.1 to 2 times for 16 MiB.
    """
    if rows[rank].data_ptr() != shard.data_ptr():
        rows[rank].copy_(shard)
    for start in range(0, max(row.numel() for row in rows), part_numel):
        parts = [row[start : start + part_numel].view(torch.uint8) for row in rows]  # gloo takes few dtypes
        _wait_each(
            dist.broadcast(part, group_src=owner, group=group, async_op=True)
            for owner, part in enumerate(parts)
            if part.numel()
        )


def reduce(rows: Sequence[torch.Tensor], room: torch.Tensor, rank: int, part_numel: int, group: Any) -> None:
    """Sum all ranks' row `rank` into this rank's, at most `part_numel` elements at once. `room`: receives others'
    parts. See [Note: Collectives by owner]."""
    for start in range(0, max(row.numel() for row in rows), part_numel):
        parts = [row[start : start + part_numel] for row in rows]
        own_numel = parts[rank].numel()
        received = [room[other * part_numel :][:own_numel] for other in range(len(rows) - 1)]
        received.insert(rank, parts[rank])
        _wait_each(_exchange_parts(parts, received, rank, group))
        add_in_order(received, parts[rank])


def _wait_each(started: Iterable[Any]) -> None:
    """Wait until every one of `started`, works of torch.distributed, no longer uses its memory. Raise the first
    error."""
    errors: list[Exception] = []
    for work in list(started):
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _exchange_parts(
    parts: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int, group: Any
) -> Iterator[Any]:
    """Start to send each other rank its part, and to receive its copy of this rank's."""
    for other, part in enumerate(received):
        if other != rank and part.numel():
            yield dist.irecv(part, group_src=other, group=group)
    for other, part in enumerate(parts):
        if other != rank and part.numel():
            yield dist.isend(part, group_dst=other, group=group)
