"""Define the nvme tier, which keeps bytes in swap files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer, wait_all, wait_quietly
from tiered_zero.errors import StoreError
from tiered_zero.hardware.memory.host_memory import Lease, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.plan.placement import COMMIT_KINDS
from tiered_zero.record.manifest import Record
from tiered_zero.record.store import SwapStore
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.tiers.tier import Slot, StartCopy, Tier, UnitUpdate, as_bytes


@dataclass(kw_only=True)
class _Chunk:
    """One read from disk within a fetch. `part`: the device memory to fill, [n] uint8. `offset`: the first byte in the
    slot. `lease`: the staging buffer; None until it is leased. `read`: the transfer from disk; None until it begins."""

    part: torch.Tensor
    offset: int
    lease: Lease | None = None
    read: Transfer | None = None


@dataclass(kw_only=True)
class _Fetch:
    """A fetch under way. `target`: the device memory to fill, [n] uint8. `pages`: the whole pages of `target`, if the
    disk can read into them directly; else None. `update`: the update that still writes the record. `is_deferred`:
    whether staging buffers are leased later, by the job on the fetch lane."""

    record: Record
    target: torch.Tensor
    pages: torch.Tensor | None
    update: UnitUpdate | None
    chunks: list[_Chunk] = field(default_factory=list)
    is_deferred: bool = False


def _release_all(chunks: list[_Chunk]) -> None:
    """Wait for the reads of `chunks`, ignore their errors, and release their staging buffers."""
    for chunk in chunks:
        with chunk.lease or nullcontext():
            if chunk.read:
                wait_quietly(chunk.read)


def _kind_of(slot: Slot, place: int) -> str:
    """Return the kind under which the ledger counts a slot's place on disk. `place`: 0 for the slot's first place, 1
    for its second."""
    return COMMIT_KINDS.get(slot.kind, slot.kind) if place else slot.kind


def _memory(buffer: torch.Tensor) -> memoryview:
    """Return a memoryview of the buffer, for the store. The memoryview keeps the buffer's memory alive."""
    array: Any = buffer.numpy()
    return memoryview(array)


class NvmeTier(Tier):
    """Keeps slots as records of `store`, in swap files."""

    name = "nvme"

    def __init__(self, store: SwapStore, staging: StagingPool, runtime: Runtime) -> None:
        self.store = store
        self._staging = staging
        self._accelerator = runtime.accelerator
        self._ledger = runtime.ledger
        self._recorder = runtime.recorder
        self._records: dict[str, Record] = {}
        self._recovered = store.records()
        """Records of a resumed run that have no slot yet."""
        self._num_charged: dict[Slot, int] = {}
        """Slot -> how many of the slot's places on disk are charged to the ledger."""
        self._deferred = 0
        """The number of fetches under way whose staging buffers are leased later, by their job on the fetch lane."""
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        found = self._recovered.pop(name, None)
        if found is not None and (found.nbytes, found.committed) != (nbytes, num_durable > 0):
            raise StoreError(
                f"The recovered record {name!r} has {found.nbytes} bytes; expected {nbytes}. Its run had another "
                "layout."
            )
        slot = Slot(name=name, nbytes=nbytes, kind=kind)
        self._charge(slot, max(1, num_durable) if found is None else len(found.offsets))
        self._records[name] = found or self.store.reserve(
            name, nbytes, committed=num_durable > 0, write_once=num_durable == 1
        )
        return slot

    def read(self, slot: Slot, out: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Transfer:
        """Start to read a slot; see `Tier.read`. `urgent`: whether compute waits for this read; see `IOEngine.read`."""
        return self.store.read(self._records[slot.name], _memory(out), offset, urgent=urgent)

    def write(self, slot: Slot, data: torch.Tensor, offset: int = 0, after: Transfer | None = None) -> Transfer:
        record = self._records[slot.name]
        transfer = self.store.write(record, _memory(data), offset)
        self._charge(slot, self.store.num_slots(record))  # a slot of `num_durable` 1, written again, takes a second
        return transfer

    def _charge(self, slot: Slot, num_places: int) -> None:
        """Charge the slot's bytes to the ledger once for each place on disk that is not charged yet. `num_places`: the
        number of the slot's places now. A slot that is written again after a commit has two."""
        for place in range(self._num_charged.get(slot, 0), num_places):
            self._ledger.charge(self.name, _kind_of(slot, place), slot.nbytes)
            self._num_charged[slot] = place + 1

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        """Fetch a slot in chunks, in one job on the fetch lane. See `Tier.fetch`."""
        if after is not None and after.written.done():
            after.written.wait()  # raises if the update failed, before any buffer is leased
            after = None
        target, compute = as_bytes(out), self._accelerator.record_compute()
        pages = self._accelerator.host_pages(target)
        fetch = _Fetch(record=self._records[slot.name], target=target, pages=pages, update=after)
        try:
            spans = [(0, target.numel())]
            if after is not None:
                spans = after.begin_copies(target, self._copier(compute, in_place=pages is not None))
            with self._lock:
                # While a deferred fetch is queued, later fetches lease in their own jobs: so a job waits only for
                # buffers of jobs ahead of it on the lane.
                self._cut(fetch, spans, takes_buffers=pages is None and after is None and not self._deferred)
                fetch.is_deferred = pages is None and (after is not None or fetch.chunks[-1].lease is None)
                self._deferred += fetch.is_deferred
            job = partial(self._land, fetch)
            return self._accelerator.lane("fetch").submit(job, after=[compute], holds=[target])
        except Exception:
            _release_all(fetch.chunks)
            if after is not None:
                after.cancel_copies()
            raise

    def _copier(self, compute: Transfer, in_place: bool) -> StartCopy:
        """Return a function that starts a copy to the device. `in_place`: whether the calling thread copies, before the
        function returns. If False, a lane copies, once the transfer `compute` is done."""
        copy = self._accelerator.copy

        def copy_at_once(target: torch.Tensor, source: torch.Tensor) -> Transfer:
            copy(target, source)
            return COMPLETED

        if in_place:
            return copy_at_once
        submit = self._accelerator.lane("write_back").submit  # a job on the fetch lane may wait for an update
        return lambda target, source: submit(partial(copy, target, source), after=[compute], holds=[target])

    def _cut(self, fetch: _Fetch, spans: Sequence[tuple[int, int]], takes_buffers: bool = False) -> None:
        """Cut `spans`, ranges of bytes (from, to), into chunks of the fetch. If `fetch.pages` is set, start to read
        every chunk into `fetch.pages`. Else, if `takes_buffers`, start to read chunks while a staging buffer is free.
        `_land` reads the remaining chunks."""
        pages, record = fetch.pages, fetch.record
        most = self._staging.buffer_nbytes if pages is None else fetch.target.numel()
        for start, end in ((at, min(at + most, stop)) for begin, stop in spans for at in range(begin, stop, most)):
            fetch.chunks.append(chunk := _Chunk(part=fetch.target[start:end], offset=start))
            nbytes = align_up(end - start, PAGE_NBYTES)
            # urgent: compute waits for parameters; the prefetch limit bounds how long reads of state wait
            if pages is not None:
                chunk.read = self.store.read(record, _memory(pages[start : start + nbytes]), start, urgent=True)
            elif takes_buffers and (lease := self._staging.lease_nowait(nbytes, record.name)) is not None:
                chunk.lease = lease
                chunk.read = self.store.read(record, _memory(lease.tensor), start, urgent=True)
            else:
                takes_buffers = False

    def _land(self, fetch: _Fetch) -> None:
        """Copy each chunk to the device. Runs as a job on the fetch lane."""
        record, chunks = fetch.record, fetch.chunks
        try:
            if fetch.update is not None:
                self._cut(fetch, fetch.update.finish_copies())
            while chunks:
                chunk = chunks[0]
                nbytes = chunk.part.numel()
                if chunk.read is None:
                    chunk.lease = self._staging.lease(align_up(nbytes, PAGE_NBYTES), record.name, lane="fetch")
                    chunk.read = self.store.read(record, _memory(chunk.lease.tensor), chunk.offset, urgent=True)
                del chunks[0]
                moved_nbytes = nbytes if chunk.lease else 0  # else the disk's own span counts the bytes
                with chunk.lease or nullcontext(), self._recorder.span("fetch", "fetch", record.name, moved_nbytes):
                    with self._recorder.span("fetch", "wait_param", record.name):  # the disk works, not this lane
                        wait_all([chunk.read])
                    if chunk.lease is not None:
                        self._accelerator.copy(chunk.part, chunk.lease.tensor[:nbytes], finish=True)
        finally:
            _release_all(chunks)
            with self._lock:
                self._deferred -= fetch.is_deferred

    def drain(self) -> None:
        """Wait for all requests to the disk. The lanes must be idle."""
        self.store.drain_all()
        self._deferred = 0

    def close(self) -> None:
        """Subtract the bytes of all slots from the ledger. The store stays open until `TierRack`'s teardown closes
        it."""
        for slot, num_places in self._num_charged.items():
            for place in range(num_places):
                self._ledger.discharge(self.name, _kind_of(slot, place), slot.nbytes)
        self._num_charged.clear()
        self._records.clear()
