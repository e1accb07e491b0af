"""Run the collectives of many ranks over torch.distributed's process groups."""

from __future__ import annotations

import logging
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from typing import Any, final
from zlib import crc32

import torch
import torch.distributed as dist

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import RankError
from tiered_zero.hardware.device.accelerator import Accelerator, Lane, run_job
from tiered_zero.hardware.ranks.collectives import Collectives, ensure_many
from tiered_zero.hardware.ranks.gather_reduce import (
    ORDER_NBYTES,
    compare_order,
    exchange_on_device,
    exchange_on_host,
    gather_on_device,
    gather_on_host,
    reduce,
    split_rows,
)
from tiered_zero.hardware.ranks.launcher import (
    HOST_BACKEND,
    all_gather_single,
    device_backend,
    get_world_size,
    network_interface,
)
from tiered_zero.hardware.ranks.rank_failures import CollectiveCall, CollectiveTransfer, RankFailures

logger = logging.getLogger("tiered_zero")

GROUPS = ("collectives", "control")
"""Names of the process groups for host memory. Each group has a lane (a worker thread). "collectives" runs gathers and
reductions. "control" runs calls for which the driver thread waits. If collectives run on an accelerator, a third group,
"order", compares the names of gathers between ranks."""

DEVICE = "device"
"""The name by which `_submit` recognizes gathers and reductions on a device.

[Note: Collectives of a device] Gathers and reductions share one process group and one lane, and all ranks make their
calls in the same order. (Two groups would also need one order, because their kernels wait in the same device queues.)
The lane's stream waits for the events of earlier work, and later work waits for events of that stream, so the host does
not wait for the device. A reduction exchanges parts, and each rank adds them in rank order, as on the host ([Note:
Collectives by owner]). The backend's own reduction adds in an order that depends on the number of ranks and bytes."""

FREED_S = 5.0
"""The most seconds that one wait for running collectives takes while an engine closes."""

INLINE_NBYTES = 248
"""The most bytes of data for which an `exchange` needs only one collective."""

_HEAD = struct.Struct("<II")
"""The header of an exchange's message: the number of bytes of data, and a checksum of the kind of call."""


class _Phase(Enum):
    """The state of this rank's process groups. FAILED: this rank has posted its failure, and starts no more
    collectives."""

    NEW = auto()
    OPEN = auto()
    FAILED = auto()
    CLOSED = auto()


@final
class _SharedNotices(logging.Filter):
    """Drops notices and warnings on all ranks except rank 0, because all ranks log the same ones."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or self._rank == 0


@final
class ProcessGroups(Collectives):
    """The collectives of a run with several ranks. CPU tensors use gloo groups that this object makes; device tensors
    use the device's backend. Used on the driver thread. The collectives run on lanes (worker threads).

    A rank that fails posts a message and closes its groups. Within seconds every other rank raises RankError with this
    message. A rank that is stopped posts nothing; the other ranks raise RankError after the timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        """Read rank and world size from torch.distributed."""
        super().__init__()
        self._timeout_s = timeout_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._groups: dict[str, Any] = {}
        self._lanes: dict[str, Lane] = {}
        self._accelerator: Accelerator | None = None
        self._device_group: Any = None
        self._last: dict[str, CollectiveTransfer] = {}
        """Lane -> its last collective. The next gather or reduction waits for it: [Note: Gathers that meet]."""
        self._phase = _Phase.NEW
        self._why_closed = "its engine was closed"
        self._notices = _SharedNotices(self.rank)
        logger.addFilter(self._notices)

    def open(self) -> None:
        try:
            for name in GROUPS:
                self._open_group(name)
            run = f"tiered_zero/{_next_run(self._groups['control'])}"
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.world_size} cannot connect to the others: {error}. Every rank calls "
                "tiered_zero.initialize() once, in the same order."
            ) from error
        store = dist.distributed_c10d.PrefixStore(run, dist.distributed_c10d._get_default_store())
        self.failures = RankFailures(store, self.rank, self.world_size, self._timeout_s, self.traffic, self.recorder)
        self._phase = _Phase.OPEN  # from now on `fail` reaches the others
        for name in GROUPS:
            self._lanes[name] = Lane(f"rank {name}", run_job)

    def connect_device(self, accelerator: Accelerator) -> None:
        device = accelerator.device
        if device.type == "cpu":
            return
        backend, self._accelerator = device_backend(device), accelerator
        try:
            self._device_group = dist.new_group(backend=backend, timeout=timedelta(seconds=self._timeout_s))
            self._try_device(accelerator)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} of {self.world_size} cannot connect {device} to the other ranks' devices by "
                f"{backend}: {error}"
            ) from error
        self._open_group("order")
        self._lanes["order"] = Lane(f"rank {self.rank} order", run_job)

    def _try_device(self, accelerator: Accelerator) -> None:
        """Run a first gather and reduction. Many backends connect only then, and a failure to connect should be raised
        here."""
        ranks = torch.arange(self.world_size, device=accelerator.device)
        own, room = ranks[self.rank : self.rank + 1], torch.empty_like(ranks)[1:]
        after = [accelerator.record_compute()]  # which may still use the memory of both
        self.all_gather(ranks, own, "the first gather", after=after).wait()
        self.reduce_scatter(ranks, room, "the first reduction", after=after).wait()
        if int(own) != (expected := self.rank * self.world_size):
            raise RuntimeError(f"the sum of all ranks was expected to be {expected}; found {int(own)}")

    def _open_group(self, name: str) -> None:
        with network_interface():
            timeout = timedelta(seconds=self._timeout_s)
            self._groups[name] = dist.new_group(backend=HOST_BACKEND, timeout=timeout)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_gather(
        self,
        flat: torch.Tensor,
        shard: torch.Tensor,
        what: str = "parameters",
        *,
        after: Sequence[Transfer] = (),
        order: str | None = None,
        bounds: Sequence[int] | None = None,
    ) -> Transfer:
        rows = split_rows(flat, bounds, self.world_size)
        assert rows[self.rank].numel() == shard.numel(), "the part is this rank's"
        self.traffic.gathered_nbytes += flat.nbytes
        call = self._count("collectives", "all_gather")
        name = f"{order}, as collective {call.number}"
        if not flat.is_cpu:
            if order is not None:
                compare = partial(compare_order, name, self._groups.get("order"), self.world_size)
                after = [*after, self._submit("order", self._count("order", "order"), what, compare)]
            job = partial(gather_on_device, flat, rows, shard, self.rank, self._device_group)
            return self._submit(DEVICE, call, what, job, flat.nbytes, after, [flat, shard])
        group = self._groups.get("collectives")

        def gather() -> None:
            if order is not None:
                compare_order(name, group, self.world_size)
            gather_on_host(rows, shard, self.rank, group)

        return self._submit("collectives", call, what, gather, flat.nbytes, after)

    def reduce_scatter(
        self,
        bucket: torch.Tensor,
        room: torch.Tensor,
        what: str = "gradients",
        *,
        after: Sequence[Transfer] = (),
        bounds: Sequence[int] | None = None,
    ) -> Transfer:
        rows = split_rows(bucket, bounds, self.world_size)
        self.traffic.reduced_nbytes += bucket.nbytes
        part_numel = room.numel() // (self.world_size - 1)
        assert part_numel, "there is room for an element of each other rank"
        call = self._count("collectives", "reduce_scatter")
        if bucket.is_cpu:
            lane, exchange, group = "collectives", exchange_on_host, self._groups.get("collectives")
        else:
            lane, exchange, group = DEVICE, exchange_on_device, self._device_group
        job = partial(reduce, rows, room, self.rank, part_numel, exchange, group)
        return self._submit(lane, call, what, job, bucket.nbytes, after, [bucket, room])

    def broadcast(self, tensor: torch.Tensor, source: int = 0, what: str = "values") -> None:
        if not tensor.numel():
            return
        group = self._groups.get("control")
        values = tensor.detach().cpu().contiguous()
        memory = values.view(-1).view(torch.uint8)  # gloo takes few dtypes
        call = self._count("control", "broadcast")
        self._submit("control", call, what, lambda: dist.broadcast(memory, group_src=source, group=group)).wait()
        if not tensor.is_cpu or values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)

    def exchange(self, data: bytes, what: str = "messages", *, kind: str = "") -> list[bytes]:
        head = _HEAD.pack(len(data), crc32((kind or what).encode()))
        first = (head + data[:INLINE_NBYTES]).ljust(_HEAD.size + INLINE_NBYTES, b"\0")
        found = self._gather_bytes(first, what)
        sizes, kinds = zip(*(_HEAD.unpack_from(message) for message in found), strict=True)
        if len(set(kinds)) > 1:
            name = what.encode()[:ORDER_NBYTES].ljust(ORDER_NBYTES)
            names = [each.decode(errors="replace").strip() for each in self._gather_bytes(name, what)]
            texts = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            raise RankError(f"Every rank was expected to make the same call; found {texts}.")
        if max(sizes) <= INLINE_NBYTES:
            return [message[_HEAD.size : _HEAD.size + size] for message, size in zip(found, sizes, strict=True)]
        found = self._gather_bytes(data.ljust(max(sizes), b"\0"), what)
        return [message[:size] for message, size in zip(found, sizes, strict=True)]

    def _gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        group = self._groups.get("control")
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        out = torch.empty(self.world_size * own.numel(), dtype=torch.uint8)
        call = self._count("control", "control")
        self._submit("control", call, what, lambda: all_gather_single(out, own, group=group)).wait()
        return [part.numpy().tobytes() for part in out.view(self.world_size, -1)]

    def _submit(
        self,
        name: str,
        call: CollectiveCall,
        what: str,
        job: Callable[[], object],
        nbytes: int = 0,
        after: Sequence[Transfer] = (),
        holds: Sequence[torch.Tensor] = (),
    ) -> CollectiveTransfer:
        """Submit a collective to the lane `name`. `nbytes`: this rank's bytes, for the recorded span; 0: no span.
        `after`, `holds`: see `Lane.submit`.

        [Note: Gathers that meet] The n-th gather of a rank receives the bytes of the n-th gather of every other rank,
        even if they gather different data: gathers have no names unless their order is compared. So after a gather has
        failed on a rank, for example because its fetch failed, this rank makes no later gather or reduction, on the
        host or on a device. Otherwise the other ranks would take the later call for the failed one. The other ranks
        wait until this rank posts its error.
        """
        if name == DEVICE:
            assert self._accelerator is not None, "a device is connected before anything on it is gathered or reduced"
            lane, span = self._accelerator.lane("collectives"), self._accelerator.timer(self.recorder)
        else:
            lane, span = self._lanes[name], self.recorder.span
        transfer = CollectiveTransfer(self.failures, call, f"{call.kind} of {what}")
        if name != "control" and name in self._last:
            after = [*after, self._last[name]]

        def run() -> None:
            failure: BaseException | None = None
            try:
                with span(call.kind, call.kind, what, nbytes) if nbytes else nullcontext():
                    job()
            except Exception as error:
                failure = self.failures.explain(error, transfer.what)
            if failure is not None:
                raise failure  # here, so that the backend's error is no part of another rank's

        lane.submit(run, after=after, holds=holds, transfer=transfer)
        self._last[name] = transfer
        return transfer

    def _count(self, name: str, kind: str) -> CollectiveCall:
        """Count a new collective of the group `name`, and return its `CollectiveCall`. Raises RankError if the groups
        are closed."""
        self._check_open()
        self.failures.num_calls[name] += 1
        return CollectiveCall(group=name, number=self.failures.num_calls[name], kind=kind)

    # -- failures ------------------------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Post `message`, which the other ranks raise, and close the groups."""
        if self._phase is not _Phase.OPEN:
            return
        self._phase, self._why_closed = _Phase.FAILED, message
        self.failures.post(message)
        self._close_groups()
        if self._device_group is not None:
            try:
                self._device_group.abort()  # ends every collective that hangs in it on this rank
            except Exception:
                logger.exception("ending the group of devices failed: what hangs in it may go on")

    def _check_open(self) -> None:
        if self.failures.found is not None:
            raise self.failures.found
        if self._phase is not _Phase.OPEN:
            raise RankError(f"The process groups of this run are closed: {self._why_closed}.")

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the groups and the lanes. Wait at most some seconds for running collectives. Idempotent. If an error
        ends this rank's program, the other ranks raise RankError with the text of that error."""
        if self._phase is _Phase.CLOSED:
            return
        if (uncaught := getattr(sys, "last_value", None)) is not None:
            self.fail(f"{type(uncaught).__name__}: {uncaught}")
        if self._phase is _Phase.OPEN and not self._ends_in_time():
            self.fail("it has closed its engine, or ended, in the midst of a collective")
        elif self._phase is _Phase.OPEN:
            self.failures.post_closed()
        self._close_groups()
        if self._device_group is not None:
            with suppress(Exception):
                dist.destroy_process_group(self._device_group)
            self._device_group = None
        self._close_lanes()
        self._phase = _Phase.CLOSED
        logger.removeFilter(self._notices)

    def _ends_in_time(self) -> bool:
        """Wait at most FREED_S until every collective has ended. Return whether all have ended."""
        deadline_s = time.monotonic() + FREED_S
        with suppress(Exception):  # the device may have failed
            while not all(transfer.done() for transfer in self._last.values()):
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(0.01)
            return True
        return False

    def _close_groups(self) -> None:
        """Close the groups. This frees other ranks that are blocked in them."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            with suppress(Exception):
                dist.destroy_process_group(group)

    def _close_lanes(self) -> None:
        """End the threads of the lanes. A thread whose collective has not ended after FREED_S is left running."""
        self._ends_in_time()  # a thread that returned from C++ while Python ends would crash the process
        for name, lane in self._lanes.items():
            if name not in self._last or self._last[name].done():
                lane.close()


_num_runs = 0


def _next_run(group: Any) -> int:
    """Return the number of this run, equal on every rank. It separates the run's keys in the store from other runs'."""
    global _num_runs
    number = torch.tensor(_num_runs + 1)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    _num_runs = int(number)
    return _num_runs


def make_collectives(timeout_s: float, dist_init_required: bool | None = None) -> Collectives:
    """Make the collectives of a run, on every rank at the same time. The caller opens and closes them.

    `timeout_s`: the most seconds to wait for another rank. `dist_init_required`: if False, never initialize
    torch.distributed. Raises ModelError and RankError.
    """
    if get_world_size() == 1:
        return Collectives(dist_init_required)
    ensure_many(timeout_s, dist_init_required)
    return ProcessGroups(timeout_s)
