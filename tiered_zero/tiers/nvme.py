"""Swap files as a tier: records of the store, and the staging buffers between them and the device."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from tiered_zero.concurrency.transfer import Transfer, wait_all
from tiered_zero.errors import StoreError, TieredZeroError
from tiered_zero.hardware.memory.staging import Lease, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.plan.slots import COMMIT_KINDS
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.store.manifest import Record
from tiered_zero.store.swap_store import SwapStore
from tiered_zero.tiers.tier import HostBuffer, Slot, Tier, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate


@dataclass(kw_only=True)
class _Chunk:
    """`part`: its bytes on the device; `lease`, `read`: None while no staging buffer was free."""

    part: torch.Tensor
    offset: int
    lease: Lease | None = None
    read: Transfer | None = None


def _release_all(chunks: list[_Chunk]) -> None:
    """Wait for the reads of a fetch that failed, and release their buffers; its own error is raised already."""
    for chunk in chunks:
        if chunk.lease:
            with chunk.lease, suppress(TieredZeroError):
                if chunk.read:
                    chunk.read.wait()


class NvmeTier(Tier):
    """Slots are records of `store`. `staging` carries parameters on their way to the device."""

    name = "nvme"

    def __init__(self, store: SwapStore, staging: StagingPool, runtime: Runtime) -> None:
        self.store = store
        self._staging = staging
        self._accelerator = runtime.accelerator
        self._ledger = runtime.ledger
        self._recorder = runtime.recorder
        self._records: dict[str, Record] = {}
        self._recovered = store.records()
        """Records of a run that is gone on with, which have no slot yet."""
        self._charged: dict[str, list[tuple[str, int]]] = {}
        """Slot -> kind and bytes on disk of each of its places there."""
        self._once: set[str] = set()
        """Slots that are written once, and take a second place when they are not."""
        self._deferred = 0
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        found = self._recovered.pop(name, None)
        if found is not None and (found.nbytes, found.committed) != (nbytes, num_durable > 0):
            raise StoreError(
                f"The recovered record {name!r} has {found.nbytes} bytes; expected {nbytes}. Its run had another "
                "layout."
            )
        slot = Slot(name=name, nbytes=nbytes, kind=kind)
        self._charged[name] = []
        self._charge(slot, max(1, num_durable) if found is None else len(found.offsets))
        self._records[name] = found or self.store.reserve(
            name, nbytes, committed=num_durable > 0, write_once=num_durable == 1
        )
        if num_durable == 1:
            self._once.add(name)
        return slot

    def release(self, slot: Slot) -> None:
        charged = self._charged.pop(slot.name)
        self.store.release(self._records.pop(slot.name))
        for kind, nbytes in charged:
            self._ledger.discharge(self.name, kind, nbytes)

    def view(self, slot: Slot) -> None:
        return None

    def read(self, slot: Slot, out: HostBuffer, offset: int = 0, *, urgent: bool = False) -> Transfer:
        """`urgent`: see `IOEngine.read`."""
        return self.store.read(self._records[slot.name], out.memory, offset, urgent=urgent)

    def write(self, slot: Slot, data: HostBuffer, offset: int = 0, after: Transfer | None = None) -> Transfer:
        record = self._records[slot.name]
        transfer = self.store.write(record, data.memory, offset)
        if slot.name in self._once:
            self._charge(slot, self.store.num_slots(record))
        return transfer

    def _charge(self, slot: Slot, num_places: int) -> None:
        """Charge what is not charged yet of so many places on disk."""
        charged = self._charged[slot.name]
        while len(charged) < num_places:
            kind = COMMIT_KINDS.get(slot.kind, slot.kind) if charged else slot.kind
            self._ledger.charge(self.name, kind, slot.nbytes)
            charged.append((kind, slot.nbytes))

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        """One job on the fetch lane carries all chunks, each at most one staging buffer: disk -> buffer -> device.

        Chunks whose buffer is free are read at once; the job takes buffers for the others. While a job with such chunks
        is queued, later fetches take no buffer either, so a buffer is only ever waited for behind jobs ahead on the
        lane. The reads are urgent, unlike those of the state: compute waits for them, and the prefetch limit bounds
        them, so that the state's wait no longer than it takes to read that much.
        """
        target = as_bytes(out)
        record = self._records[slot.name]
        if (pages := self._accelerator.host_pages(target)) is not None:
            return self._fetch_in_place(record, pages, target, after)
        ready = after is None or after.written.done()
        if ready and after:
            after.written.wait()  # a failed update fails here, before any buffer is taken
        chunks: list[_Chunk] = []
        try:
            with self._lock:
                for offset in range(0, target.numel(), self._staging.buffer_nbytes):
                    chunk = _Chunk(part=target[offset : offset + self._staging.buffer_nbytes], offset=offset)
                    if ready and not self._deferred and (not chunks or chunks[-1].lease):
                        chunk.lease = self._staging.lease_nowait(align_up(chunk.part.numel(), PAGE_NBYTES), record.name)
                    chunks.append(chunk)
                    if chunk.lease:
                        chunk.read = self.store.read(record, chunk.lease.memory, offset, urgent=True)
                deferred = chunks[-1].lease is None
                self._deferred += deferred
            before = [self._accelerator.record_compute(), *([after.written] if after else [])]
            job = partial(self._land, record, chunks, deferred)
            return self._accelerator.lane("fetch").submit(job, after=before, holds=[target])
        except Exception:
            _release_all(chunks)
            raise

    def _fetch_in_place(
        self, record: Record, pages: memoryview, target: torch.Tensor, after: UnitUpdate | None
    ) -> Transfer:
        """Read whole pages to where the unit is used; an update under way forwards the bytes that are not written."""
        reads: list[Transfer] = []
        pending = None if after is None or after.written.done() else after
        if pending is None:
            if after is not None:
                after.written.wait()
            reads.append(self.store.read(record, pages, 0, urgent=True))

        def job() -> None:  # without `target`: the error of one that failed must not keep its memory from others
            try:
                rest = pending.finish_forward(self._accelerator.copy) if pending is not None else []
                with self._recorder.span("fetch", "fetch", record.name):  # bytes that the disk moves are its own
                    for start, stop in rest:
                        reads.append(self.store.read(record, pages[start:stop], start, urgent=True))
                    with self._recorder.span("fetch", "wait_param", record.name):  # the disk works, not this lane
                        wait_all(reads)
            except Exception:
                with suppress(TieredZeroError):
                    wait_all(reads)
                raise

        try:
            if pending is not None:
                for start, stop in pending.forward_to(target):
                    reads.append(self.store.read(record, pages[start:stop], start, urgent=True))
            return self._accelerator.lane("fetch").submit(
                job, after=[self._accelerator.record_compute()], holds=[target]
            )
        except Exception:
            if pending is not None:
                pending.cancel_forward()
            with suppress(TieredZeroError):
                wait_all(reads)
            raise

    def _land(self, record: Record, chunks: list[_Chunk], deferred: bool) -> None:
        """Copy each chunk to the device, on the fetch lane. Releases every lease, also when a chunk fails."""
        try:
            while chunks:
                chunk = chunks.pop(0)
                nbytes = align_up(chunk.part.numel(), PAGE_NBYTES)
                lease = chunk.lease or self._staging.lease(nbytes, record.name, lane="fetch")
                with lease:
                    read = chunk.read or self.store.read(record, lease.memory, chunk.offset, urgent=True)
                    with self._recorder.span("fetch", "wait_param", record.name):
                        read.wait()
                    with self._recorder.span("fetch", "fetch", record.name, chunk.part.numel()):
                        self._accelerator.copy(chunk.part, lease.tensor[: chunk.part.numel()], finish=True)
        finally:
            _release_all(chunks)
            with self._lock:
                self._deferred -= deferred

    def drain(self) -> None:
        """Wait for what the disk still moves. The lanes are idle."""
        self.store.drain_all()

    def close(self) -> None:
        """The records end with their store."""
        for charged in self._charged.values():
            for kind, nbytes in charged:
                self._ledger.discharge(self.name, kind, nbytes)
        self._charged.clear()
        self._records.clear()
