"""Move activations (storages that autograd saves in forward) off the device, and read them back before backward needs
them. A place (host memory or NVMe, of a fixed size) holds the moved bytes. A record describes one moved storage."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from tiered_zero.concurrency.transfer import Transfer, wait_all, wait_quietly
from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.hardware.memory.host_memory import HeapTrim, Lease, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.extents import ExtentMap
from tiered_zero.plan.activations import ActivationPlan
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.system import map_memory
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.tier import HostTier, own_bytes

LANE = "activations"
MAX_HOLES_NBYTES = 64 * MIB
"""The most bytes by which holes in malloc's heap may grow before `HeapTrim` trims the heap, if the CPU computes. The
limit of bytes in flight is used instead if it is lower."""

MAX_SHARE_OF_STORAGE = 4
"""The largest ratio of a storage's bytes to the saved view's bytes. If the ratio is larger, the storage stays on the
device."""

NUM_AHEAD = 2
"""How many records are read back before backward asks for them, if there is room."""

MAX_GAP = 32
"""How many records before the current one are searched for records to read ahead."""

# -- places ------------------------------------------------------------------------------------------------------------


class Place(Protocol):
    """Space for moved activations, addressed from byte 0. Jobs on the lane call `write` and `read`, in the order of
    submission."""

    waits: bool
    """Whether `write` or `read` waits for something besides earlier jobs, such as a disk."""

    def write(self, at: int, source: torch.Tensor) -> None:
        """Copy `source`, [n] uint8 on the device, to the place, from byte `at` on. The caller may free `source` when
        the job is complete."""

    def read(self, at: int, target: torch.Tensor) -> None:
        """Fill `target`, a result of `new_target`, with the bytes of the place from `at` on."""

    def new_target(self, nbytes: int) -> torch.Tensor:
        """Return device memory that `read` can fill: [nbytes] uint8."""

    def finish(self) -> None:
        """Wait for every write, then raise the first error."""


@final
class HostPlace:
    """A place in one slot of host memory, which is pinned if the machine allows it."""

    waits = False

    def __init__(self, tier: HostTier, nbytes: int, runtime: Runtime) -> None:
        self._memory = own_bytes(tier.reserve("activation", nbytes, "activation"))
        self._accelerator = runtime.accelerator

    def write(self, at: int, source: torch.Tensor) -> None:
        self._accelerator.copy(self._memory[at : at + source.numel()], source)

    def read(self, at: int, target: torch.Tensor) -> None:
        self._accelerator.copy(target, self._memory[at : at + target.numel()])

    def new_target(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._accelerator.device)

    def finish(self) -> None:
        """Do nothing, because each copy is complete when its job is complete."""


@final
class NvmePlace:
    """One slot on NVMe for moved activations. `write` returns when the bytes are in staging buffers; a later read or
    write of the same bytes waits for the disk."""

    waits = True

    def __init__(
        self, tier: NvmeTier, nbytes: int, in_flight_nbytes: int, staging: StagingPool, runtime: Runtime
    ) -> None:
        self._tier = tier
        self._slot = tier.reserve("activation", nbytes, "activation")
        self._staging = staging
        self._accelerator, self._recorder = runtime.accelerator, runtime.recorder
        self._reads_directly = runtime.accelerator.device.type == "cpu"
        self._heap = HeapTrim(min(in_flight_nbytes, MAX_HOLES_NBYTES))
        self._writes: deque[tuple[range, Transfer, Lease]] = deque()

    def write(self, at: int, source: torch.Tensor) -> None:
        if self._reads_directly:
            self._heap.add(source.numel())
        self._finish(range(at, at + source.numel()))
        for start in range(0, source.numel(), self._staging.buffer_nbytes):
            part = source[start : start + self._staging.buffer_nbytes]
            lease = self._lease(part.numel())
            try:
                self._accelerator.copy(lease.tensor[: part.numel()], part, finish=True)
                transfer = self._tier.write(self._slot, lease.tensor, at + start)
            except BaseException:
                lease.release()
                raise
            self._writes.append((range(at + start, at + start + part.numel()), transfer, lease))

    def read(self, at: int, target: torch.Tensor) -> None:
        self._finish(range(at, at + target.numel()))
        if self._reads_directly:
            self._heap.add(target.numel())
            pages = torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())  # whole ones, as mapped
            self._wait(self._tier.read(self._slot, pages, at, urgent=True))
            return
        reads: deque[tuple[torch.Tensor, Transfer, Lease]] = deque()
        try:
            for start in range(0, target.numel(), self._staging.buffer_nbytes):
                part = target[start : start + self._staging.buffer_nbytes]
                if not self._staging.num_free and reads:
                    self._land(*reads.popleft())
                lease = self._lease(part.numel())
                try:
                    reads.append((part, self._tier.read(self._slot, lease.tensor, at + start, urgent=True), lease))
                except BaseException:
                    lease.release()
                    raise
            while reads:
                self._land(*reads.popleft())
        finally:
            for _, read, lease in reads:
                with lease, suppress(TieredZeroError):
                    read.wait()

    def new_target(self, nbytes: int) -> torch.Tensor:
        if not self._reads_directly:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._accelerator.device)
        # a new mapping each time: reuse would take 3% off a step, and add 110 MiB to the peak of memory
        mapping = map_memory(align_up(nbytes, PAGE_NBYTES), "MADV_HUGEPAGE", "MADV_DONTFORK")
        return torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]

    def finish(self) -> None:
        try:
            wait_all(transfer for _, transfer, _ in self._writes)
        finally:
            while self._writes:
                self._writes.popleft()[2].release()

    def _lease(self, nbytes: int) -> Lease:
        if not self._staging.num_free and self._writes:
            self._finish_oldest()
        return self._staging.lease(align_up(nbytes, PAGE_NBYTES), "activation", lane=LANE)

    def _finish(self, touched: range) -> None:
        while any(written.start < touched.stop and touched.start < written.stop for written, _, _ in self._writes):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        _, transfer, lease = self._writes.popleft()
        with lease:
            self._wait(transfer)

    def _land(self, part: torch.Tensor, read: Transfer, lease: Lease) -> None:
        with lease:
            self._wait(read)
            self._accelerator.copy(part, lease.tensor[: part.numel()], finish=True)

    def _wait(self, transfer: Transfer) -> None:
        with self._recorder.span(LANE, "wait_activation"):  # the disk works, not this lane
            transfer.wait()


# -- saved tensors -----------------------------------------------------------------------------------------------------


@final
class _Reference:
    """Object held by all `SavedActivation`s of one record. When autograd frees the last of them, the record is
    dropped."""

    __slots__ = ("__weakref__", "_dropped", "index", "step")

    def __init__(self, index: int, step: int, dropped: deque[tuple[int, int]]) -> None:
        self.index, self.step, self._dropped = index, step, dropped

    def __del__(self) -> None:
        """Mark the record as dropped; the driver thread frees it later. Runs at any time, on any thread."""
        self._dropped.append((self.step, self.index))


@final
@dataclass(eq=False, kw_only=True)
class _Record:
    """One moved storage. `key`: (storage, version). `counter`: an empty tensor that shares the moved tensor's version
    counter. `at`: the first byte of the storage's copy in the `Place`."""

    index: int
    key: tuple[int, int]
    counter: torch.Tensor
    storage: StorageWeakRef
    reference: weakref.ref[_Reference]
    at: int
    nbytes: int
    num_left: int = 0
    """The number of saved activations of this record that backward has not asked for yet."""
    target: torch.Tensor | None = None
    """The record's bytes on the device, once `reading` is complete."""
    reading: Transfer | None = None


@final
class SavedActivation:
    """The object that autograd keeps instead of a moved tensor. `counter`: an empty tensor that shares the moved
    tensor's version counter."""

    __slots__ = ("_mover", "_was_unpacked", "counter", "dtype", "offset", "reference", "size", "stride", "version")

    def __init__(self, mover: ActivationMover, reference: _Reference, tensor: torch.Tensor, version: int) -> None:
        self._mover, self.reference, self.version = mover, reference, version
        self.counter = _counter_of(tensor)
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.dtype = tensor.dtype
        self._was_unpacked = False

    def unpack(self) -> torch.Tensor:
        """Return the tensor on the device. Called on autograd's thread."""
        is_first, self._was_unpacked = not self._was_unpacked, True
        memory = self._mover.restore(self.reference, is_first=is_first).view(self.dtype)
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.offset)


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares the version counter of `tensor` but not its storage."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _is_shared(counter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether `counter` and `tensor` share one version counter."""
    before = tensor._version
    with _unsafe_preserve_version_counter(counter):
        increment_version(counter)
        return tensor._version != before


@final
class ActivationMover:
    """Moves the activations of one engine. Used on the driver thread, or on autograd's threads while the driver waits
    in backward."""

    def __init__(self, place: Place, plan: ActivationPlan, runtime: Runtime) -> None:
        self._place, self._extents, self._plan = place, ExtentMap(plan.nbytes), plan
        self._accelerator, self._recorder, self._ledger = runtime.accelerator, runtime.recorder, runtime.ledger
        self._device = runtime.accelerator.device
        self._records: dict[int, _Record] = {}
        self._by_key: dict[tuple[int, int], _Record] = {}
        self._writing: deque[tuple[Transfer, torch.Tensor]] = deque()
        self._dropped: deque[tuple[int, int]] = deque()
        """(step, index) of each record that no `SavedActivation` uses any more."""
        self._next_index = self._step = 0
        self._in_flight_nbytes = 0
        self._is_closed = False
        self._counts: Counter[str] = Counter()

    # -- forward -------------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor, version: int) -> SavedActivation | None:
        """Start to move the storage of a detached tensor, unless it was moved before. Return the object that autograd
        keeps instead of the tensor; None if the tensor stays on the device. `version`: the value of the tensor's
        version counter."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return None
        if torch._C._current_graph_task_id() != -1 or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None  # a recomputation in backward: the tensor is used at once
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < self._plan.min_nbytes or not self._fits(tensor, nbytes):
            return None
        key = (storage._cdata, version)
        reference = self._find(key, tensor) or self._begin_write(tensor, key, nbytes)
        if reference is None:
            return None
        self._records[reference.index].num_left += 1
        return SavedActivation(self, reference, tensor, version)

    def _fits(self, tensor: torch.Tensor, nbytes: int) -> bool:
        """Return whether the tensor is plain memory and a large enough part of its storage, which has `nbytes`
        bytes."""
        if nbytes > MAX_SHARE_OF_STORAGE * tensor.nbytes or nbytes % tensor.itemsize or tensor.is_quantized:
            return False
        return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or 0 in tensor.stride())

    def _find(self, key: tuple[int, int], tensor: torch.Tensor) -> _Reference | None:
        """Return a reference to the record of the tensor's storage; None if the current version of the storage was not
        moved. `key`: the identity of the storage, and the version."""
        record = self._by_key.get(key)
        if record is None or record.storage.expired():  # type: ignore[no-untyped-call]
            return None
        if not _is_shared(record.counter, tensor):  # made by `.data`: its bytes may have been written since
            return None
        reference = record.reference()
        self._counts["num_shared"] += reference is not None
        return reference

    def _begin_write(self, tensor: torch.Tensor, key: tuple[int, int], nbytes: int) -> _Reference | None:
        self._free_dropped()
        at = self._extents.allocate(nbytes) if nbytes <= self._plan.in_flight_nbytes else None
        if at is None:
            self._counts["num_kept"] += 1
            self._counts["kept_nbytes"] += nbytes
            return None
        try:
            self._wait_written(self._plan.in_flight_nbytes - nbytes)
            source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensor.untyped_storage())
            self._charge(nbytes)
        except BaseException:
            self._extents.free(at, nbytes)
            raise
        place, span = self._place, self._accelerator.timer(self._recorder)

        def write() -> None:
            with span(LANE, "offload", "", nbytes):
                place.write(at, source)

        after = [self._accelerator.record_compute()]
        written = self._accelerator.lane(LANE).submit(write, after=after, holds=[source], waits=place.waits)
        self._writing.append((written, source))
        reference = _Reference(self._next_index, self._step, self._dropped)
        self._next_index += 1
        self._by_key[key] = self._records[reference.index] = _Record(
            index=reference.index,
            key=key,
            counter=_counter_of(tensor),
            storage=StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
            reference=weakref.ref(reference),
            at=at,
            nbytes=nbytes,
        )
        self._counts["num_moved"] += 1
        self._counts["moved_nbytes"] += nbytes
        return reference

    def _wait_written(self, allowed_nbytes: int) -> None:
        """Make compute wait for the oldest writes until at most `allowed_nbytes` are in flight. Free the device memory
        of these writes and of completed ones."""
        while self._writing and (self._in_flight_nbytes > allowed_nbytes or self._writing[0][0].done()):
            written, source = self._writing[0]
            try:
                with nullcontext() if written.done() else self._recorder.span("compute", "wait_activation"):
                    self._accelerator.wait_on_compute(written)
            except TieredZeroError:  # the transfer has failed: raise its error once
                self._writing.popleft()
                self._discharge(source.nbytes)
                raise
            self._writing.popleft()
            self._discharge(source.nbytes)

    # -- backward ------------------------------------------------------------------------------------------------------

    def restore(self, reference: _Reference, *, is_first: bool) -> torch.Tensor:
        """Return the record's bytes on the device, [n] uint8, and begin to read the records that backward needs next.
        `is_first`: whether backward needs this saved activation for the first time. Raises ModelError if the step of
        the activation has ended."""
        if self._is_closed or reference.step != self._step:
            raise ModelError(
                "Backward was called through activations of a step that is over: expected it before step(), found "
                "it after that, or after the step was dropped. Their bytes on "
                "tiered_zero.activations.device are freed then. Run forward again."
            )
        self._free_dropped()
        record = self._records[reference.index]
        if record.reading is None:
            self._make_room(record.nbytes)
            self._begin_read(record)
        self._read_ahead(record.index)
        reading, target = record.reading, record.target
        assert reading is not None and target is not None, "the read has begun"
        with nullcontext() if reading.done() else self._recorder.span("compute", "wait_activation"):
            self._accelerator.wait_on_compute(reading)
        record.num_left -= is_first
        if record.num_left <= 0:
            self._release(record)
        return target

    def _begin_read(self, record: _Record) -> None:
        at, nbytes, place = record.at, record.nbytes, self._place
        span = self._accelerator.timer(self._recorder)
        target = place.new_target(nbytes)
        self._charge(nbytes)

        def read() -> None:
            with span(LANE, "restore", "", nbytes):
                place.read(at, target)

        after = [self._accelerator.record_compute()]  # compute may just have freed this memory
        record.target = target
        record.reading = self._accelerator.lane(LANE).submit(read, after=after, holds=[target], waits=place.waits)

    def _read_ahead(self, index: int) -> None:
        """Begin to read the records packed just before record `index`, because backward needs them next."""
        num_left = NUM_AHEAD
        for before in range(index - 1, max(-1, index - 1 - MAX_GAP), -1):
            record = self._records.get(before)
            if record is None or record.num_left <= 0:
                continue
            if record.reading is None:
                if self._in_flight_nbytes + record.nbytes > self._plan.in_flight_nbytes:
                    return
                self._begin_read(record)
                self._counts["num_prefetched"] += 1
            num_left -= 1
            if not num_left:
                return

    def _make_room(self, nbytes: int) -> None:
        """Make room for `nbytes` in flight: wait for writes and free their device memory. If that is not enough, free
        storages that were read back; they are read again when backward needs them."""
        allowed_nbytes = self._plan.in_flight_nbytes - nbytes
        self._wait_written(allowed_nbytes)
        if self._in_flight_nbytes > allowed_nbytes:
            for record in sorted(self._records.values(), key=lambda record: -record.index):
                if self._in_flight_nbytes <= allowed_nbytes:
                    return
                self._release(record)

    def _release(self, record: _Record) -> None:
        """Free the record's memory on the device. The record can be read again."""
        reading, record.reading, record.target = record.reading, None, None
        if reading is not None:
            self._accelerator.wait_on_compute(reading)
            self._discharge(record.nbytes)

    # -- the ends of a step --------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Free everything that the completed step has saved. Raises errors of transfers."""
        if self._next_index:
            written = self._accelerator.lane(LANE).submit(self._place.finish)
            with nullcontext() if written.done() else self._recorder.span("compute", "wait_activation"):
                written.wait()
            self._wait_written(0)
            for record in self._records.values():
                self._release(record)
            self._clear()

    def abort(self) -> None:
        """Free everything that the dropped step has saved."""
        if self._next_index:
            wait_quietly(self._accelerator.lane(LANE).submit(self._place.finish))
            self._clear()

    def close(self) -> None:
        """Free everything. Called when the lane has ended."""
        self._is_closed = True
        with suppress(TieredZeroError):  # nothing needs these bytes any more
            self._place.finish()
        self._clear()

    def take_counts(self) -> dict[str, int]:
        """Return the counts and bytes of storages moved and of storages that did not fit, since the last call."""
        counts, self._counts = dict(self._counts), Counter()
        return counts

    def _clear(self) -> None:
        """Drop all records of the step. Called when no job is queued and every transfer is complete."""
        self._step += 1
        self._next_index = 0
        self._records.clear()
        self._by_key.clear()
        self._writing.clear()
        self._dropped.clear()
        self._extents = ExtentMap(self._extents.capacity_nbytes)
        self._in_flight_nbytes = 0
        self._ledger.correct("device", "activation_in_flight", 0)

    def _free_dropped(self) -> None:
        """Remove records that autograd has dropped, and free their bytes in host memory or on NVMe."""
        while self._dropped:
            step, index = self._dropped.popleft()
            if step != self._step:
                continue
            record = self._records.pop(index)
            self._release(record)
            self._extents.free(record.at, record.nbytes)
            if self._by_key.get(record.key) is record:
                del self._by_key[record.key]

    def _charge(self, nbytes: int) -> None:
        self._ledger.charge("device", "activation_in_flight", nbytes)
        self._in_flight_nbytes += nbytes

    def _discharge(self, nbytes: int) -> None:
        self._in_flight_nbytes -= nbytes
        self._ledger.discharge("device", "activation_in_flight", nbytes)
