"""Swap files as a tier: records of the store, and the staging buffers between them and the device."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from tiered_zero.errors import TieredZeroError
from tiered_zero.hardware.accelerator import Accelerator, Event
from tiered_zero.hardware.staging import Lease, StagingPool
from tiered_zero.io.engine import Ticket
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.store.swap_store import Record, SwapStore
from tiered_zero.telemetry.spans import Recorder
from tiered_zero.tiers.tier import HostBuffer, Slot, Tier, as_bytes


class TicketEvent(Event):
    """A disk request (or several that belong together) as an event."""

    def __init__(self, *tickets: Ticket) -> None:
        self._tickets = tickets

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()


@dataclass
class _Chunk:
    """`part`: its bytes on the device; `lease`, `ticket`: None while no staging buffer was free."""

    part: torch.Tensor
    offset: int
    lease: Lease | None
    ticket: Ticket | None


class NvmeTier(Tier):
    """Slots are records of `store`. `staging` carries parameters on their way to the device."""

    name = "nvme"

    def __init__(self, store: SwapStore, staging: StagingPool, accelerator: Accelerator, recorder: Recorder) -> None:
        self._store = store
        self._staging = staging
        self._accelerator = accelerator
        self._recorder = recorder
        self._records: dict[str, Record] = {}
        self._deferred = 0
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int, kind: str) -> Slot:
        self._records[name] = self._store.reserve(name, nbytes)
        return Slot(name, nbytes, kind)

    def release(self, slot: Slot) -> None:
        self._store.release(self._records.pop(slot.name))

    def view(self, slot: Slot) -> None:
        return None

    def read(self, slot: Slot, out: HostBuffer, offset: int = 0) -> Event:
        return TicketEvent(self._store.read(self._records[slot.name], out.memory, offset))

    def write(self, slot: Slot, data: HostBuffer, offset: int = 0) -> Event:
        return TicketEvent(self._store.write(self._records[slot.name], data.memory, offset))

    def fetch(self, slot: Slot, out: torch.Tensor, after: Event | None = None) -> Event:
        """One job on the gather lane carries all chunks, each at most one staging buffer: disk -> buffer -> device.

        Chunks whose buffer is free are read at once; the job takes buffers for the others. While a job with such chunks
        is queued, later fetches take no buffer either, so a buffer is only ever waited for behind jobs ahead on the lane.
        """
        target = as_bytes(out)
        record = self._records[slot.name]
        ready = after is None or after.done()
        if ready and after:
            after.wait()  # a failed update fails here, before any buffer is taken
        chunks: list[_Chunk] = []
        with self._lock:
            for offset in range(0, target.numel(), self._staging.buffer_nbytes):
                part = target[offset : offset + self._staging.buffer_nbytes]
                lease = None
                if ready and not self._deferred and (not chunks or chunks[-1].lease):
                    lease = self._staging.lease_nowait(align_up(part.numel(), PAGE_NBYTES))
                chunks.append(_Chunk(part, offset, lease, self._store.read(record, lease.memory, offset) if lease else None))
            deferred = chunks[-1].lease is None
            self._deferred += deferred
        before = [self._accelerator.record_compute()] + ([after] if after else [])
        job = partial(self._land, record, chunks, deferred)
        return self._accelerator.lane("gather").submit(job, after=before, holds=[target])

    def _land(self, record: Record, chunks: list[_Chunk], deferred: bool) -> None:
        """On the gather lane: the end of a fetch's way. Gives every lease back, also when a chunk fails."""
        try:
            while chunks:
                chunk = chunks.pop(0)
                lease = chunk.lease or self._staging.lease(align_up(chunk.part.numel(), PAGE_NBYTES))
                with lease:
                    ticket = chunk.ticket or self._store.read(record, lease.memory, chunk.offset)
                    ticket.wait()
                    self._accelerator.copy(chunk.part, lease.tensor[: chunk.part.numel()], finish=True)
        finally:
            for chunk in chunks:
                if chunk.lease and chunk.ticket:
                    with chunk.lease, suppress(TieredZeroError):  # the first chunk's error is on its way already
                        chunk.ticket.wait()
            with self._lock:
                self._deferred -= deferred

    def close(self) -> None:
        self._records.clear()
