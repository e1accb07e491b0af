"""Gather and reduce host memory over gloo, on a lane of `ProcessGroups`, and define what devices share with it: the
ranks' parts, the order of a sum, the comparison of what ranks gather."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from tiered_zero.errors import RankError
from tiered_zero.hardware.ranks.launcher import all_gather_single

ORDER_NBYTES = 256
"""The number of bytes that ranks compare of a gather's order: a digest, and as much of the text as fits. Names of calls
that differ are sent in as many bytes."""


def split_rows(flat: torch.Tensor, bounds: Sequence[int] | None, world_size: int) -> list[torch.Tensor]:
    """Return a view of each rank's part of `flat`. `bounds`: offsets of the parts; None: all have one size. All ranks
    must pass equal sizes: gloo ends the process otherwise."""
    ends = range(0, flat.numel() + 1, flat.numel() // world_size or 1) if bounds is None else bounds
    rows = [flat[start:stop] for start, stop in pairwise(ends)]
    assert len(rows) == world_size and ends[-1] == flat.numel(), "bounds cover the whole"
    return rows


def add_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of `parts`, added in order, to `out`, which is one of them; the others are overwritten."""
    first, *others = parts
    room = first if first is not out else others[0]
    for number, part in enumerate(others, start=1):
        first = torch.add(first, part, out=out if number == len(others) else room)


def compare_order(order: str, group: Any, world_size: int) -> None:
    """Raise RankError if another rank gathers something else now. `order`: the name of what this rank gathers. `group`:
    a process group over host memory. On a lane's thread."""
    message = sha256(order.encode()).digest() + order.encode()
    own = torch.frombuffer(bytearray(message[:ORDER_NBYTES].ljust(ORDER_NBYTES)), dtype=torch.uint8)
    out = torch.empty(world_size * ORDER_NBYTES, dtype=torch.uint8, device="cpu")
    all_gather_single(out, own, group=group)
    found = [bytes(message.tolist()) for message in out.view(world_size, -1)]
    if len(set(found)) > 1:
        texts = [message[sha256().digest_size :].decode(errors="replace").strip() for message in found]
        raise RankError(
            "Every rank was expected to use the same modules in the same order, as each has a shard of their "
            f"parameters; now {', '.join(f'rank {rank} gathers {text}' for rank, text in enumerate(texts))}. Let "
            "every rank call every module (a part that some leave out can be multiplied by zero), or set "
            "zero_optimization.stage to 2. Experts that a rank chooses belong inside one block, and "
            "tiered_zero.unit_size_cap left out."
        )


def gather(rows: Sequence[torch.Tensor], shard: torch.Tensor, rank: int, part_numel: int, group: Any) -> None:
    """Fill `rows` with all ranks' shards, at most `part_numel` elements of each at once. `shard`: this rank's shard,
    which may be its row.

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
    """Sum row `rank` of all ranks into this rank's row, at most `part_numel` elements at once. `room`: memory to
    receive the parts of other ranks. See [Note: Collectives by owner]."""
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
    """Start to send each other rank its part, and to receive from each other rank its copy of this rank's part. Yield
    the works of torch.distributed."""
    for other, part in enumerate(received):
        if other != rank and part.numel():
            yield dist.irecv(part, group_src=other, group=group)
    for other, part in enumerate(parts):
        if other != rank and part.numel():
            yield dist.isend(part, group_dst=other, group=group)
