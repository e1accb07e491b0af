"""Gather and reduce host memory over gloo, and memory on a device with the backend that torch has for it.

The functions for host memory run on a lane (a worker thread) of `ProcessGroups`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from itertools import pairwise
from typing import Any, final

import torch
import torch.distributed as dist

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import RankError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.ranks.launcher import all_gather_single, device_backend
from tiered_zero.hardware.ranks.rank_failures import CollectiveCall, DeviceCollective, RankFailures

logger = logging.getLogger("tiered_zero")

LANE = "collectives"
"""The lane that carries a device's gathers and reductions."""

ORDER_NBYTES = 256
"""The size of the messages in which ranks compare what they gather: a digest, and as much of the text as fits."""


def split_rows(flat: torch.Tensor, bounds: Sequence[int] | None, world_size: int) -> list[torch.Tensor]:
    """Return a view of each rank's part of `flat`. `bounds`: W + 1 offsets of the parts; None: all parts have one size.
    Every rank must pass the same sizes: gloo ends the process otherwise."""
    ends = range(0, flat.numel() + 1, flat.numel() // world_size or 1) if bounds is None else bounds
    rows = [flat[start:stop] for start, stop in pairwise(ends)]
    assert len(rows) == world_size and ends[-1] == flat.numel(), "bounds cover the whole"
    return rows


def add_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add `parts` in their order, and write the sum to `out`, which is one of them. The other parts are overwritten."""
    first, *others = parts
    room = first if first is not out else others[0]
    for number, part in enumerate(others, start=1):
        first = torch.add(first, part, out=out if number == len(others) else room)


def compare_order(order: str, group: Any, world_size: int) -> None:
    """Compare what all ranks gather now; raise RankError if their names differ. `order`: the name of what this rank
    gathers. `group`: a process group over host memory. On a lane's thread."""
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
    """Fill `rows`, one view for each rank, with the ranks' shards, at most `part_numel` elements in a message. `shard`:
    this rank's; it may be `rows[rank]` itself.

    [Note: Collectives by owner] A gather is a broadcast of each rank's shard. A reduction sends each part to the rank
    that owns it, which adds what it receives in rank order. All messages of a call are under way at once. Parts may
    differ in size, and move without copies. gloo's all_gather and reduce_scatter first copy everything: for 64 MiB at 4
    ranks on one host the gather took 235 ms, the broadcasts 58 ms. gloo's reduce adds in an order that depends on an
    element's place in the tensor.
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
    """Sum all ranks' copies of row `rank` into this rank's copy, at most `part_numel` elements at once. `room`: memory
    to receive the other ranks' copies. See [Note: Collectives by owner]."""
    for start in range(0, max(row.numel() for row in rows), part_numel):
        parts = [row[start : start + part_numel] for row in rows]
        own_numel = parts[rank].numel()
        received = [room[other * part_numel :][:own_numel] for other in range(len(rows) - 1)]
        received.insert(rank, parts[rank])
        _wait_each(_exchange_parts(parts, received, rank, group))
        add_in_order(received, parts[rank])


def _wait_each(started: Iterable[Any]) -> None:
    """Wait for all of `started`, works of torch.distributed, also after one fails. Then raise the first error."""
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
    """Start to send `parts[r]` to each other rank r, and to receive `received[r]` from it. Yield torch's handle (Work)
    of each."""
    for other, part in enumerate(received):
        if other != rank and part.numel():
            yield dist.irecv(part, group_src=other, group=group)
    for other, part in enumerate(parts):
        if other != rank and part.numel():
            yield dist.isend(part, group_dst=other, group=group)


@final
class DeviceCollectives:
    """Gathers and reduces tensors on a device, for `ProcessGroups`. Used on the driver thread; has lanes of
    its own.

    [Note: Collectives of a device] Gathers and reductions share one process group and one lane, and all ranks make
    their calls in one order. (A second group would need this order, too: kernels of both wait in one device's queues.)
    The lane's stream waits for the events of earlier work, and later work waits for events of that stream: the host
    waits for no device. A reduction exchanges parts, and each rank sums them in rank order, as on the host ([Note:
    Collectives by owner]). The backend's own reduction adds in an order that depends on the number of ranks and bytes.

    [Note: Comparisons before gathers] At stage 3 ranks compare what they gather, over the host's backend, before each
    launch. Without this, gathers of different units would mix their bytes if the units have one size, and hang if they
    have two. A comparison takes 0.26 ms (2 ranks of one host). It has its own lane, and runs during the fetch of the
    shard. A modelled step of 7B takes 2.2 s with comparisons and without.
    """

    def __init__(self, accelerator: Accelerator, failures: RankFailures, rank: int, world_size: int, timeout_s: float):
        self._accelerator = accelerator
        self._failures = failures
        self._span = accelerator.timer(failures.recorder)
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self._group: Any = None
        self.last: Transfer | None = None
        """The last collective; the next one is launched after it. See [Note: Gathers that meet]."""

    def open(self, call: Callable[[str, str], CollectiveCall]) -> None:
        """Connect the devices of all ranks, and try a gather and a reduction. `call(group, kind)`: counts a collective.
        Raises ConfigError and RankError."""
        device = self._accelerator.device
        backend = device_backend(device)
        try:
            self._group = dist.new_group(backend=backend, timeout=timedelta(seconds=self._timeout_s))
            self._accelerator.lane(LANE)  # start its thread here, where a failure is handled
            self._try(call)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self._rank} of {self._world_size} cannot connect {device} to the other ranks' devices by "
                f"{backend}: {error}"
            ) from error

    def _try(self, call: Callable[[str, str], CollectiveCall]) -> None:
        """Run a first gather and a first reduction: many backends connect only in these, and a failure should be raised
        here. `call(group, kind)`: counts a collective."""
        ranks = torch.arange(self._world_size, device=self._accelerator.device)
        rows, others = split_rows(ranks, None, self._world_size), torch.empty_like(ranks)[1:]
        own, after = rows[self._rank], [self._accelerator.record_compute()]
        self.all_gather(ranks, rows, own, "the first gather", call(LANE, "all_gather"), after).wait()
        self.reduce_scatter(ranks, rows, others, "the first reduction", call(LANE, "reduce_scatter"), ()).wait()
        if int(own) != (expected := self._rank * self._world_size):
            raise RuntimeError(f"the sum of all ranks was expected to be {expected}; found {int(own)}")

    def all_gather(
        self,
        flat: torch.Tensor,
        rows: Sequence[torch.Tensor],
        shard: torch.Tensor,
        what: str,
        call: CollectiveCall,
        after: Sequence[Transfer],
    ) -> Transfer:
        """Start to fill `rows`, one view of `flat` for each rank, with the ranks' shards. `what`, `call`: name and
        number of the collective, for errors. `after`: transfers that must complete before it starts."""
        group, own = self._group, rows[self._rank]

        def gather() -> None:
            with self._span("all_gather", "all_gather", what, flat.nbytes):
                if own.data_ptr() != shard.data_ptr():
                    self._accelerator.copy(own, shard)
                parts = [row.view(torch.uint8) for row in rows]  # not every backend has every dtype
                if len({part.numel() for part in parts}) == 1:
                    all_gather_single(flat.view(torch.uint8), parts[self._rank], group=group)
                    return
                for owner, part in enumerate(parts):
                    if part.numel():
                        dist.broadcast(part, group_src=owner, group=group)

        return self._submit(gather, f"all_gather of {what}", call, after, [flat, shard])

    def reduce_scatter(
        self,
        bucket: torch.Tensor,
        rows: Sequence[torch.Tensor],
        room: torch.Tensor,
        what: str,
        call: CollectiveCall,
        after: Sequence[Transfer],
    ) -> Transfer:
        """Start to sum this rank's row of `bucket` over all ranks, in rank order and in place. `rows`: one view of
        `bucket` for each rank. `room`: memory for the other ranks' copies of the row. `what`, `call`: name and number
        of the collective, for errors. `after`: transfers that must complete before it starts."""
        group, rank = self._group, self._rank
        part_numel = room.numel() // (self._world_size - 1)

        def reduce() -> None:
            with self._span("reduce_scatter", "reduce_scatter", what, bucket.nbytes):
                for start in range(0, max(row.numel() for row in rows), part_numel):
                    parts = [row[start : start + part_numel] for row in rows]
                    own = parts[rank]
                    received = [room[i * part_numel :][: own.numel()] for i in range(self._world_size - 1)]
                    received.insert(rank, own[:0])
                    sent = [own[:0] if other == rank else part for other, part in enumerate(parts)]
                    dist.all_to_all(received, sent, group=group)
                    received[rank] = own
                    add_in_order(received, own)

        return self._submit(reduce, f"reduce_scatter of {what}", call, after, [bucket, room])

    def _submit(
        self,
        job: Callable[[], None],
        what: str,
        call: CollectiveCall,
        after: Sequence[Transfer],
        holds: Sequence[torch.Tensor],
    ) -> Transfer:
        transfer = DeviceCollective(self._failures, call, what)

        def run() -> None:
            try:
                job()
            except Exception as error:
                raise self._failures.explain(error, what) from error

        if self.last is not None:
            after = [*after, self.last]
        self.last = transfer
        self._accelerator.lane(LANE).submit(run, after=after, holds=holds, transfer=transfer)
        return transfer

    def abort(self) -> None:
        """End every collective that hangs in the group on this rank. None begins after this. Any thread; idempotent."""
        if (group := self._group) is not None:
            try:
                group.abort()
            except Exception:
                logger.exception("ending the group of devices failed: what hangs in it may go on")

    def close(self) -> None:
        """End the group. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                dist.destroy_process_group(group)
