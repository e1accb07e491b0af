"""Gather and reduce memory on a device, with the backend that torch has for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import RankError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.ranks.host_collectives import add_in_order, split_rows
from tiered_zero.hardware.ranks.launcher import all_gather_single, device_backend
from tiered_zero.hardware.ranks.rank_failures import CollectiveCall, DeviceCollective, RankFailures

logger = logging.getLogger("tiered_zero")

LANE = "collectives"
"""The lane that carries gathers and reductions."""


@final
class DeviceCollectives:
    """The device part of `ProcessGroups`. Driver thread, except the lanes inside.

    [Note: Collectives of a device] Gathers and reductions share one group and one lane. The lane's stream waits for the
    events of earlier work, and later work waits for events of that stream: the host launches, and waits for no device.
    Calls have one order on all ranks; two groups would need that too, since kernels of both wait in one device's
    queues. A gather moves bytes. A reduction exchanges parts, and each rank sums them in rank order, as on the host
    ([Note: Collectives by owner]): the order of the backend's own reduction depends on the number of ranks and bytes.

    [Note: Comparisons before gathers] At stage 3 ranks compare what they gather, over the host's backend, before each
    launch: gathers of different units would mix their bytes if the units have one size, and hang if they have two. A
    comparison took 0.26 ms (2 ranks of one host). It has its own lane, begins when the gather is asked for, during the
    fetch of the shard, and ends before compute comes to the unit. Modelled with two ranks and other load, a step of 7B
    (65 gathers, 2.1 s of compute) took 2.16 to 2.18 s with comparisons, once 2.35 s, and 2.16 to 2.20 s without. So
    gathers that repeat the last step's order are compared, too: leaving out these comparisons would gain nothing.
    """

    def __init__(self, accelerator: Accelerator, failures: RankFailures, rank: int, world_size: int, timeout_s: float):
        self._accelerator = accelerator
        self._failures = failures
        self._span = accelerator.timer(failures.recorder)
        self._rank, self._world_size = rank, world_size
        self._timeout_s = timeout_s
        self._group: Any = None
        self.last: Transfer | None = None
        """The last collective. [Note: Gathers that meet]"""

    def open(self, call: Callable[[str, str], CollectiveCall]) -> None:
        """Connect the devices of all ranks, and try both kinds of collectives. `call`: counts a collective, given its
        group and kind, and returns its CollectiveCall. Raises ConfigError and RankError."""
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
        """Run one gather and one reduction. Many backends connect at the first collective: a failure to connect is then
        raised here, and not in the first step."""
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
        """Start to fill `rows`, the parts of `flat`, with the shards of all ranks. `shard`: this rank's."""
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
        """Start to sum this rank's row of `bucket` over all ranks, in rank order. `room`: receives the rows of other
        ranks."""
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
        """End every collective that hangs in the group, on this rank. No collective begins after this. Any thread;
        idempotent."""
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
