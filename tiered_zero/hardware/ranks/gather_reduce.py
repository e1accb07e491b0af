"""Gather and reduce tensors: in host memory over gloo, and in device memory over torch's backend for the device.

`split_rows` runs on the driver thread. All other functions run on a lane (a worker thread).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from tiered_zero.errors import RankError
from tiered_zero.hardware.ranks.launcher import all_gather_single

ORDER_NBYTES = 256
"""The size in bytes of the message in which a rank names the data that it gathers: a digest of the name, then as much
of the name as fits."""


def split_rows(flat: torch.Tensor, bounds: Sequence[int] | None, world_size: int) -> list[torch.Tensor]:
    """Return a view of each rank's part of `flat`. `bounds`: W + 1 offsets of the parts; None: all parts have the same
    size. Every rank must pass the same sizes; otherwise gloo ends the process."""
    ends = range(0, flat.numel() + 1, flat.numel() // world_size or 1) if bounds is None else bounds
    rows = [flat[start:stop] for start, stop in pairwise(ends)]
    assert len(rows) == world_size and ends[-1] == flat.numel(), "bounds cover the whole"
    return rows


def add_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add `parts` in their order, and write the sum to `out`, which is one of the parts. The other parts are
    overwritten."""
    first, *others = parts
    room = first if first is not out else others[0]
    for number, part in enumerate(others, start=1):
        first = torch.add(first, part, out=out if number == len(others) else room)


def compare_order(order: str, group: Any, world_size: int) -> None:
    """Compare the ranks' names for the data that they gather now; raise RankError if the names differ. `order`: this
    rank's name. `group`: a process group over host memory.

    [Note: Comparisons before gathers] At stage 3, ranks compare what they gather before each gather, over the host's
    backend. Without this, gathers of different units would mix the units' bytes if the units have the same size, and
    hang if they do not. A comparison takes 0.26 ms (2 ranks on one host). With a device, comparisons have their own
    lane, and run while the shard is fetched. A modelled step of a 7B model takes 2.2 s with and without comparisons."""
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


def gather_on_host(rows: Sequence[torch.Tensor], shard: torch.Tensor, rank: int, group: Any) -> None:
    """Fill `rows`, one view for each rank, with the ranks' shards. `shard`: this rank's shard; it may be `rows[rank]`
    itself.

    [Note: Collectives by owner] A gather broadcasts each rank's shard. A reduction sends each part to the rank that
    owns it, and this rank adds the parts in rank order. Parts may differ in size, and are sent without copies. gloo's
    all_gather and reduce_scatter copy everything first: for 64 MiB and 4 ranks on one host, the gather took 235 ms, the
    broadcasts took 58 ms. gloo's reduce adds in an order that depends on an element's place in the tensor.
    """
    _copy_own(rows[rank], shard)
    parts = [row.view(torch.uint8) for row in rows]  # gloo takes few dtypes
    _wait_each(
        dist.broadcast(part, group_src=owner, group=group, async_op=True)
        for owner, part in enumerate(parts)
        if part.numel()
    )


def gather_on_device(
    flat: torch.Tensor, rows: Sequence[torch.Tensor], shard: torch.Tensor, rank: int, group: Any
) -> None:
    """Fill `rows`, one view of `flat` for each rank, with the ranks' shards. `shard`: this rank's shard; it may be
    `rows[rank]` itself."""
    _copy_own(rows[rank], shard)
    parts = [row.view(torch.uint8) for row in rows]  # not every backend has every dtype
    if len({part.numel() for part in parts}) == 1:
        all_gather_single(flat.view(torch.uint8), parts[rank], group=group)
        return
    for owner, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, group_src=owner, group=group)


def _copy_own(row: torch.Tensor, shard: torch.Tensor) -> None:
    if row.data_ptr() != shard.data_ptr():
        row.data.copy_(shard.data, non_blocking=True)  # .data: autograd's version counters do not change


Exchange = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], int, Any], None]
"""A function exchange(sent, received, rank, group): sends `sent[r]` to every other rank r, fills `received[r]` from
rank r."""


def reduce(
    rows: Sequence[torch.Tensor], room: torch.Tensor, rank: int, part_numel: int, exchange: Exchange, group: Any
) -> None:
    """Sum all ranks' copies of row `rank` into this rank's copy, at most `part_numel` elements at once. `room`: memory
    to receive the other ranks' copies. See [Note: Collectives by owner]."""
    for start in range(0, max(row.numel() for row in rows), part_numel):
        parts = [row[start : start + part_numel] for row in rows]
        own = parts[rank]
        received = [room[other * part_numel :][: own.numel()] for other in range(len(rows) - 1)]
        received.insert(rank, own)
        exchange(parts, received, rank, group)
        add_in_order(received, own)


def exchange_on_host(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int, group: Any) -> None:
    """Exchange tensors in host memory with the other ranks, as `Exchange` describes."""
    _wait_each(_start_exchange(sent, received, rank, group))


def exchange_on_device(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int, group: Any) -> None:
    """Exchange tensors in device memory with the other ranks, as `Exchange` describes."""
    outputs, inputs = [*received], [*sent]
    outputs[rank] = inputs[rank] = sent[rank][:0]
    dist.all_to_all(outputs, inputs, group=group)


def _wait_each(started: Iterable[Any]) -> None:
    """Wait for all of `started`, torch.distributed's `Work` objects, even if one fails. Then raise the first error."""
    errors: list[Exception] = []
    for work in list(started):
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _start_exchange(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int, group: Any
) -> Iterator[Any]:
    """Start an exchange, and yield the `Work` object of each message."""
    for other, part in enumerate(received):
        if other != rank and part.numel():
            yield dist.irecv(part, group_src=other, group=group)
    for other, part in enumerate(sent):
        if other != rank and part.numel():
            yield dist.isend(part, group_dst=other, group=group)
