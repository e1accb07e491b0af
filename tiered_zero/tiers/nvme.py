"""Swap files as a tier: records of the store, and the staging buffers between them and the device."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from tiered_zero.errors import TieredZeroError
from tiered_zero.hardware.accelerator import Event
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.hardware.staging import Lease, StagingPool
from tiered_zero.io.engine import Ticket
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.store.manifest import Record
from tiered_zero.store.swap_store import SwapStore
from tiered_zero.telemetry.spans import Recorder
from tiered_zero.tiers.tier import HostBuffer, Slot, Tier, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate


class TicketEvent(Event):
    """A disk request as an event; the first wait that finds it complete records it on its disk lane."""

    def __init__(self, ticket: Ticket, name: str, recorder: Recorder) -> None:
        self._ticket = ticket
        self._name = name
        self._recorder = recorder
        self._start_s = time.perf_counter()
        self._lock = threading.Lock()
        self._recorded = False

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> None:
        self._ticket.wait()
        with self._lock:
            first, self._recorded = not self._recorded, True
        if first:
            request = self._ticket.request
            end_s = self._start_s + self._ticket.seconds
            self._recorder.add(f"disk {request.kind}", request.kind, self._name, self._start_s, end_s, request.nbytes)


@dataclass
class _Chunk:
    """`part`: its bytes on the device; `lease`, `read`: None while no staging buffer was free."""

    part: torch.Tensor
    offset: int
    lease: Lease | None = None
    read: Event | None = None


def _give_back(chunks: list[_Chunk]) -> None:
    """A fetch broke off, and its error is on its way already: the reads under way end, and their buffers go back."""
    for chunk in chunks:
        if chunk.lease:
            with chunk.lease, suppress(TieredZeroError):
                if chunk.read:
                    chunk.read.wait()


def _await_all(reads: list[Event]) -> None:
    """Until none of them writes to its memory any more; raises the first error."""
    errors: list[TieredZeroError] = []
    for read in reads:
        try:
            read.wait()
        except TieredZeroError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class NvmeTier(Tier):
    """Slots are records of `store`. `staging` carries parameters on their way to the device."""

    name = "nvme"

    def __init__(self, store: SwapStore, staging: StagingPool, runtime: Runtime) -> None:
        self._store = store
        self._staging = staging
        self._accelerator = runtime.accelerator
        self._ledger = runtime.ledger
        self._recorder = runtime.recorder
        self._records: dict[str, Record] = {}
        self._reserved: dict[str, Slot] = {}
        self._deferred = 0
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int, kind: str) -> Slot:
        self._ledger.charge(self.name, kind, nbytes)
        self._reserved[name] = slot = Slot(name, nbytes, kind)
        self._records[name] = self._store.reserve(name, nbytes)
        return slot

    def release(self, slot: Slot) -> None:
        del self._reserved[slot.name]
        self._store.release(self._records.pop(slot.name))
        self._ledger.discharge(self.name, slot.kind, slot.nbytes)

    def view(self, slot: Slot) -> None:
        return None

    def read(self, slot: Slot, out: HostBuffer, offset: int = 0) -> Event:
        return self._read(self._records[slot.name], out.memory, offset)

    def write(self, slot: Slot, data: HostBuffer, offset: int = 0) -> Event:
        record = self._records[slot.name]
        return TicketEvent(self._store.write(record, data.memory, offset), slot.name, self._recorder)

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Event:
        """One job on the gather lane carries all chunks, each at most one staging buffer: disk -> buffer -> device.

        Chunks whose buffer is free are read at once; the job takes buffers for the others. While a job with such chunks
        is queued, later fetches take no buffer either, so a buffer is only ever waited for behind jobs ahead on the
        lane. The reads are urgent, unlike those of the state: compute waits for them, and the prefetch limit bounds
        them, so that the state's wait no longer than it takes to read that much.
        """
        target = as_bytes(out)
        record = self._records[slot.name]
        if (pages := self._accelerator.host_pages(target)) is not None:
            return self._fetch_in_place(record, pages, target, after)
        ready = after is None or after.done()
        if ready and after:
            after.wait()  # a failed update fails here, before any buffer is taken
        chunks: list[_Chunk] = []
        try:
            with self._lock:
                for offset in range(0, target.numel(), self._staging.buffer_nbytes):
                    chunk = _Chunk(target[offset : offset + self._staging.buffer_nbytes], offset)
                    if ready and not self._deferred and (not chunks or chunks[-1].lease):
                        chunk.lease = self._staging.lease_nowait(align_up(chunk.part.numel(), PAGE_NBYTES), record.name)
                    chunks.append(chunk)
                    if chunk.lease:
                        chunk.read = self._read(record, chunk.lease.memory, offset, urgent=True)
                deferred = chunks[-1].lease is None
                self._deferred += deferred
            before = [self._accelerator.record_compute()] + ([after] if after else [])
            job = partial(self._land, record, chunks, deferred)
            return self._accelerator.lane("gather").submit(job, after=before, holds=[target])
        except BaseException:
            self._store.drain(record)  # also of a read whose ticket an interrupt has lost
            _give_back(chunks)
            raise

    def _fetch_in_place(
        self, record: Record, pages: memoryview, target: torch.Tensor, after: UnitUpdate | None
    ) -> Event:
        """Whole pages, from the disk to where the unit is used; an update under way brings what it has not written."""
        nbytes = target.numel()
        reads: list[Event] = []
        pending = None if after is None or after.done() else after
        if pending is None:
            if after is not None:
                after.wait()
            reads.append(self._read(record, pages, 0, urgent=True))

        def job() -> None:  # without `target`: the error of one that failed must not keep its memory from others
            try:
                rest = pending.take_rest(self._accelerator.copy) if pending is not None else []
                with self._recorder.span("gather", "fetch", record.name, nbytes):
                    for start, stop in rest:
                        reads.append(self._read(record, pages[start:stop], start, urgent=True))
                    _await_all(reads)
            except BaseException:
                with suppress(TieredZeroError):
                    _await_all(reads)
                raise

        try:
            if pending is not None:
                for start, stop in pending.receive(target):
                    reads.append(self._read(record, pages[start:stop], start, urgent=True))
            return self._accelerator.lane("gather").submit(
                job, after=[self._accelerator.record_compute()], holds=[target]
            )
        except BaseException:
            self._store.drain(record)
            if pending is not None:
                pending.withdraw()
            with suppress(TieredZeroError):
                _await_all(reads)
            raise

    def _land(self, record: Record, chunks: list[_Chunk], deferred: bool) -> None:
        """On the gather lane: the end of a fetch's way. Gives every lease back, also when a chunk fails."""
        try:
            while chunks:
                chunk = chunks.pop(0)
                nbytes = align_up(chunk.part.numel(), PAGE_NBYTES)
                lease = chunk.lease or self._staging.lease(nbytes, record.name, lane="gather")
                with lease:
                    read = chunk.read or self._read(record, lease.memory, chunk.offset, urgent=True)
                    with self._recorder.span("gather", "wait_param", record.name):
                        read.wait()
                    with self._recorder.span("gather", "fetch", record.name, chunk.part.numel()):
                        self._accelerator.copy(chunk.part, lease.tensor[: chunk.part.numel()], finish=True)
        finally:
            _give_back(chunks)
            with self._lock:
                self._deferred -= deferred

    def _read(self, record: Record, into: memoryview, offset: int, *, urgent: bool = False) -> TicketEvent:
        return TicketEvent(self._store.read(record, into, offset, urgent=urgent), record.name, self._recorder)

    def drain(self) -> None:
        """The lanes are idle: wait for what the disk still moves for calls that were broken off, and forget them."""
        self._store.drain_all()
        self._deferred = 0

    def close(self) -> None:
        """The records end with their store."""
        for slot in self._reserved.values():
            self._ledger.discharge(self.name, slot.kind, slot.nbytes)
        self._reserved.clear()
        self._records.clear()
