"""Hold the gradients of one unit at their home, and copy them there from the device.

[Note: Waits for gradients] Copies start as gradients come. The reduce lane's stream runs copies in order, so it is
enough to wait for a unit's last copy. Autograd's thread waits if too many bytes are in flight. The update waits for the
gradients that it needs. A window (a host buffer for one unit's gradients that rest on NVMe) is written to disk only
after the copies into it have ended. To sum gradients in host memory, the reduce lane waits for the copies into each
staging buffer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, final

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer, wait_quietly
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.accelerator import Lane, LaneTransfer
from tiered_zero.hardware.memory.host_memory import Lease, StagingPool, typed_view
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import FlatEntry, Unit
from tiered_zero.native.norms import GradCopy, GradNorm
from tiered_zero.sizes import align_up
from tiered_zero.tiers.step_gradients import FlatWindows, PagedFlat, UnitShare
from tiered_zero.tiers.tier import Home, Tier

SUM_CHUNK_NUMEL = 1 << 15
"""The number of elements that the reduce lane adds at once. It is so small that torch uses only the lane's own thread
to add them."""

BATCH_NBYTES = 1 << 20
"""The size in bytes at which a batch of a unit's gradients is sent, as one job. When the unit's last gradient has
arrived, a smaller batch is sent too. For a small gradient, such as that of a bias, a job of its own would cost more
time than the copy. Gradients to add in host memory are sent only when they fill a staging buffer, because a job that
adds must wait for its copies to the buffer."""

STAGED_ALIGNMENT = 64
"""Alignment in bytes of gradients in one staging buffer: a cache line."""

NUM_KEPT = 4
"""The number of transferred batches that are kept. Autograd's thread frees older batches, in the order in which they
were sent. If the reduce lane freed them, at varying times, holes of 25 MiB would be left in the heap."""


class ExpiredGradient(torch.Tensor):
    """The class of a tensor that the user got as `param.grad`, after it has stopped being the gradient. Its memory may
    hold other values, so every use raises ModelError."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            "This gradient was read as parameter.grad in an earlier step (or before zero_grad()); its memory is used "
            "again since. Keep parameter.grad.clone() instead."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return "ExpiredGradient()"


@dataclass(kw_only=True)
class UnitGradients:
    """The gradients of one unit. The elements of sets and the keys of dicts are parameter indices. The object is
    changed on the driver thread or autograd's; the reduce lane sets `norms` and `squares`.

    * `flat`: the gradients, 1-D, in the unit's dtype, or in fp32 if micro-batches are summed; padding is zero. Empty if
      the gradients are on NVMe, in `paged`. The method `opened` lends the gradients from either place.
    * `spare`, `paged_spare`: a second flat, if a step's update runs during the next backward.
    * `present`: parameters with a gradient in this step. `arrived`: parameters with a gradient in this backward.
      `earlier`: parameters with a gradient in earlier steps, counted since zero_grad() last set gradients to None.
    * `norms`: norms of gradients. `squares`: sums of squares of averages in this rank's shard. Most are computed on
      arrival.
    * `last`: the last transfer of gradients to their home. `frozen`: whether the update of these gradients has begun.
    * `shown`: the tensors that users got as `param.grad`: views of the flat; copies, with a loss scale or on NVMe; or
      the user's own tensors, for parameters in `assigned`.
    * `zeroed`: parameters whose gradient was set to 0, so that the next gradient replaces it.
    * `shard`: the elements of the unit that are in `flat`, if these are only this rank's shard; None if `flat` has all.
    * `num_sums`: the number of reductions of this step whose averages are in `flat`. At 0, a shard in `flat` is
      undefined, except after `set_zero`.
    * `waiting`: this rank's gradients [numel] that no bucket has copied yet; fp32 if they are sums. They wait here if
      `flat` holds a shard or averages."""

    unit: Unit
    flat: torch.Tensor
    spare: torch.Tensor | None
    on_device: bool
    present: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    norms: dict[int, float | torch.Tensor] = field(default_factory=dict)
    squares: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    last: Transfer | None = None
    frozen: bool = False
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    assigned: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    earlier: set[int] = field(default_factory=set)
    shard: range | None = None
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)
    num_sums: int = 0
    paged: PagedFlat | None = None
    paged_spare: PagedFlat | None = None

    @classmethod
    def reserve(
        cls,
        unit: Unit,
        tier: Tier,
        *,
        nbytes: int,
        dtype: torch.dtype,
        has_spare: bool,
        shard: range | None = None,
        windows: FlatWindows | None = None,
        cuts: Iterable[int] = (),
    ) -> UnitGradients:
        """Reserve a slot of `nbytes` on `tier`. With `has_spare`, reserve two slots. If `nbytes` is 0, reserve none.
        `windows`: lends host memory to gradients on NVMe; not needed on other tiers. `cuts`: where the update's reads
        begin, as indices of elements in the unit's flat."""
        start = 0 if shard is None else shard.start
        numel = unit.numel if shard is None else len(shard)
        padding = tuple(_padding(unit)) if shard is None else ()
        flats: list[torch.Tensor] = []
        paged: list[PagedFlat] = []
        for kind in ("gradient", "gradient_spare")[: 1 + has_spare]:
            if not nbytes:  # a rank without any parameter of the unit
                flats.append(torch.empty(0, dtype=dtype, device="cpu"))
                continue
            slot = tier.reserve(f"{kind}/{unit.index}", nbytes, "gradient")
            if (raw := slot.tensor) is None:
                assert windows is not None, "gradients on nvme are planned with windows"
                own_cuts = [cut - start for cut in cuts]
                paged.append(PagedFlat(Home(tier, slot), windows, dtype, numel, cuts=own_cuts, padding=padding))
                flats.append(torch.empty(0, dtype=dtype, device="cpu"))
                continue
            flats.append(flat := typed_view(raw, dtype, numel))
            for part in padding:  # not the entries: they get memory from the system when they are written
                flat[part] = 0
        return cls(
            unit=unit,
            flat=flats[0],
            spare=flats[1] if has_spare else None,
            on_device=tier.name == "device",
            shard=shard,
            paged=paged[0] if paged else None,
            paged_spare=paged[1] if paged and has_spare else None,
        )

    @property
    def tier_name(self) -> str:
        return "device" if self.on_device else "host"

    def storages(self) -> set[int]:
        """Return the identities of the storages of `flat` and `spare`."""
        return {flat.untyped_storage()._cdata for flat in (self.flat, self.spare) if flat is not None}

    @cached_property
    def start(self) -> int:
        """The element of the unit at which `flat` begins: 0, or the start of this rank's shard."""
        return 0 if self.shard is None else self.shard.start

    @property
    def holds_sums(self) -> bool:
        """Whether this rank's own gradients of the unit are in fp32, as sums are. These gradients are in `waiting`, or
        in `flat` if `flat` holds the whole unit."""
        own = [*([self.flat] if self.shard is None else []), *self.waiting.values()]
        return any(values.dtype == torch.float32 for values in own)

    @property
    def is_unreduced(self) -> bool:
        """Whether this rank has gradients of the unit that no bucket has copied for a reduction."""
        return bool(self.waiting if self.shard is not None or self.num_sums else self.present)

    def opened(self, lane: str = "compute") -> AbstractContextManager[torch.Tensor]:
        """A context manager that lends the unit's gradients as one tensor in memory. `lane`: the calling lane;
        "compute" for the driver thread."""
        return nullcontext(self.flat) if self.paged is None else self.paged.windows.open(self.paged, lane)

    def submit(
        self, lane: Lane, job: Callable[[], None], after: Sequence[Transfer], holds: Sequence[torch.Tensor]
    ) -> Transfer:
        """Submit `job` to `lane`, and return the job's transfer. `job`: launches copies to the tensor that `opened`
        lends. `after`: transfers that the job waits for. `holds`: device tensors that the job reads."""
        if (paged := self.paged) is None:
            return lane.submit(job, after=after, holds=holds, waits=False)
        transfer = LaneTransfer(launched=threading.Event())

        def run() -> None:
            paged.arriving = transfer  # gradients are written to disk only after these copies
            job()

        return lane.submit(run, after=after, holds=holds, transfer=transfer)

    def share(self) -> UnitShare:
        return UnitShare(
            flat=self.flat,
            start=self.start,
            present=frozenset(self.present),
            last=self.last,
            on_device=self.on_device,
            paged=self.paged if self.present else None,
        )

    def swap(self) -> None:
        """Exchange `flat` and `spare`, so that the next backward writes to one while the update reads the other."""
        if self.spare is not None:
            self.flat, self.spare = self.spare, self.flat
        if self.paged_spare is not None:
            self.paged, self.paged_spare = self.paged_spare, self.paged

    def clear(self) -> None:
        self.earlier |= self.present
        self.last = None
        self.frozen = False
        self.present.clear()
        self.arrived.clear()
        self.norms.clear()
        self.squares = {}  # a failed job may still fill the old dict
        self.zeroed.clear()
        if self.shown:
            self.expire_views()
        self.assigned.clear()
        self.waiting.clear()
        self.num_sums = 0
        if self.paged is not None:
            self.paged = self.paged.next()

    def wait_transfers(self) -> None:
        """Block until every gradient that was sent has reached its home. Raises transfer errors."""
        if self.last is not None:
            self.last.wait()

    def copy(self, entry: FlatEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy of one gradient in the parameter's shape. `dtype`: None keeps the dtype of the flat."""
        with self.opened() as flat:
            return entry.param.view(flat[entry.start : entry.stop]).to(dtype or flat.dtype, copy=True)

    def show(self, entry: FlatEntry, loss_scale: float) -> torch.Tensor:
        """Return the tensor that users get as `param.grad`: the tensor that the user has assigned, or else a view of
        `flat`. With a loss scale, or on NVMe, return an unscaled copy instead of a view. Until the next backward or
        step, each call returns the same object."""
        index = entry.param.index
        if index not in self.assigned:
            self.wait_transfers()
            self.zeroed.discard(index)
            if index not in self.shown:
                is_live = loss_scale == 1.0 and self.paged is None
                view = entry.param.view(self.flat[entry.start : entry.stop]) if is_live else None
                self.shown[index] = self._shown_copy(entry, loss_scale) if view is None else view
        return self.shown[index]

    def _shown_copy(self, entry: FlatEntry, loss_scale: float) -> torch.Tensor:
        return self.copy(entry) if loss_scale == 1.0 else self.copy(entry, torch.float32).mul_(1 / loss_scale)

    def take_changed(self, loss_scale: float) -> list[tuple[FlatEntry, torch.Tensor]]:
        """Return the gradients that users assigned, and the copies that users changed, both without the loss scale.
        Every copy that a user still holds expires, so that its use raises ModelError."""
        if not self.shown:
            return []
        self.wait_transfers()
        found: list[tuple[FlatEntry, torch.Tensor]] = []
        for entry in self.unit.entries:
            if (index := entry.param.index) not in self.shown:
                continue
            value, is_assigned = self.shown.pop(index), index in self.assigned
            if is_assigned or not _same_bits(value, self._shown_copy(entry, loss_scale)):
                found.append((entry, value.detach()))
            self.assigned.discard(index)
            if not is_assigned:
                value.__class__ = ExpiredGradient
        return found

    def entries_present(self) -> dict[int, torch.Tensor]:
        """Return views [numel] of the gradients in `flat`, by parameter index; only for parameters with a gradient."""
        present = (entry for entry in self.unit.entries if entry.param.index in self.present)
        return {entry.param.index: self.flat[entry.start : entry.stop] for entry in present}

    def take_waiting(self) -> dict[int, torch.Tensor]:
        """Return the gradients in `waiting`, and empty `waiting`. The caller must call `GradientStore.free_taken` once
        buckets have copied them."""
        taken, self.waiting = self.waiting, {}
        return taken

    def check_new(self, entry: FlatEntry, grad: torch.Tensor) -> None:
        """Raise ModelError if a new gradient `grad` cannot be taken: it is sparse, or the unit's update has begun."""
        if grad.layout is not torch.strided:
            raise ModelError(
                f"The gradient of {entry.param.name} is sparse; gradients are reduced as dense arrays. "
                "Build the embedding with sparse=False."
            )
        if self.frozen:
            raise ModelError(
                f"{entry.param.name} gets a gradient although the update of this step has begun: without clipping and "
                "overflow checks updates begin in backward, when every gradient of a unit has come once. Set "
                '"tiered_zero": {"optimizer_in_backward": false} for loops with several backward passes in some steps.'
            )

    def assign(self, entry: FlatEntry, value: torch.Tensor) -> None:
        """Make `value` the parameter's gradient, replacing any other."""
        self.remove(entry)
        self.shown[entry.param.index] = value
        self.assigned.add(entry.param.index)
        self.present.add(entry.param.index)

    def remove(self, entry: FlatEntry) -> None:
        """Remove the parameter's gradient."""
        index = entry.param.index
        self.expire_views([index])
        for owner in (self.present, self.assigned, self.zeroed):
            owner.discard(index)

    def adds_to(self, index: int) -> bool:
        """Return whether the parameter's next gradient is added to the present one, instead of replacing it."""
        return index in self.present and index not in self.zeroed

    def store_assigned(self) -> None:
        """Copy the tensors that users have assigned as `param.grad` to the gradients' home."""
        if not self.assigned:
            return
        self.wait_transfers()
        for entry in self.unit.entries:
            if (index := entry.param.index) in self.assigned:
                self.replace(entry, self.shown.pop(index).detach())
                self.assigned.discard(index)

    def replace(self, entry: FlatEntry, value: torch.Tensor) -> None:
        """Copy `value`, in the parameter's shape, to the gradient's home."""
        with self.opened() as flat:
            view = entry.param.view(flat[entry.start : entry.stop])
            view.copy_(value)
        self.norms.pop(entry.param.index, None)
        if value.stride() != view.stride():  # torch sums a norm in memory order
            self.norms[entry.param.index] = torch.linalg.vector_norm(value, 2, dtype=torch.float32)

    def set_zero(self) -> None:
        """Set the gradients of the parameters in `present` and `earlier` to 0."""
        self.wait_transfers()
        self.present |= self.earlier
        self.waiting.clear()
        self.squares = {}
        self.num_sums = 0
        with self.opened() as flat:
            if self.shard is not None:
                flat.zero_()
                return
            for entry in self.unit.entries:
                if (index := entry.param.index) in self.present and index not in self.assigned:
                    flat[entry.start : entry.stop] = 0
        for entry in self.unit.entries:
            if (index := entry.param.index) in self.present:
                if index in self.shown:
                    self.shown[index].zero_()
                else:
                    self.zeroed.add(index)
        self.norms.clear()

    def expire_views(self, indices: Iterable[int] | None = None) -> None:
        """Make tensors that users got as `param.grad` raise ModelError at every use, because other values will take
        their memory. Tensors that users assigned stay usable. `indices`: of the parameters; None: all."""
        for index in tuple(self.shown) if indices is None else indices:
            view = self.shown.pop(index, None)
            if view is not None and index not in self.assigned:
                view.__class__ = ExpiredGradient


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same bits, so that a NaN equals itself."""
    bits = torch.int32 if left.itemsize == 4 else torch.int16
    return torch.equal(left.view(bits), right.view(bits))


def _padding(unit: Unit) -> Iterator[slice]:
    """Yield the gaps in the unit's flat, between entries and after the last one."""
    stops = [0, *(entry.stop for entry in unit.entries)]
    starts = [*(entry.start for entry in unit.entries), unit.numel]
    for stop, start in zip(stops, starts, strict=True):
        if stop < start:
            yield slice(stop, start)


# -- from the device to the home ---------------------------------------------------------------------------------------


def copy_or_add(source: torch.Tensor, target: torch.Tensor, *, adds: bool, divisor: float = 1.0) -> None:
    """Divide `source` [n] in place by `divisor`, then copy or add it to the first elements of `target`. Runs on the
    reduce lane."""
    for low in range(0, source.numel(), SUM_CHUNK_NUMEL):
        chunk = source[low : low + SUM_CHUNK_NUMEL]
        into = target[low:][: chunk.numel()]
        if divisor != 1.0:
            chunk.div_(divisor)
        into.add_(chunk) if adds else into.copy_(chunk)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One gradient on its way to its home. `index`: its parameter. `source`: its values, [n]. `place`: its elements in
    the unit's flat. `adds`: whether to add it to the gradient there; False replaces that gradient."""

    index: int
    place: slice
    source: torch.Tensor
    adds: bool


@final
class GradientBatch(Transfer):
    """The transfer of several gradients of one unit to their home, by one job. `measures`: whether to compute their
    norms. `send`: submits the job; `wait` calls `send` if the job is not submitted yet."""

    def __init__(self, gradients: UnitGradients, measures: bool, send: Callable[[], None]) -> None:
        self.gradients, self.measures = gradients, measures
        self.arrivals: list[Arrival] = []
        self.nbytes = 0
        self.job: Transfer | None = None
        self._send = send

    def done(self) -> bool:
        return self.job is not None and self.job.done()

    def wait(self) -> None:
        if self.job is None:
            self._send()
        if self.job is not None:  # else the batch was dropped
            self.job.wait()


@dataclass(eq=False, kw_only=True)
class _Load:
    """One staging buffer in use. `arrival`: the transfer that fills the buffer. `parts`: the copies and sums to make
    from the buffer after `arrival`."""

    lease: Lease
    parts: list[GradCopy] = field(default_factory=list)
    arrival: Transfer = COMPLETED


@final
class InFlightGradients:
    """Sends gradients from the device to their homes, and limits the bytes in flight (gradients whose transfer has not
    ended). Used on the driver thread or autograd's."""

    def __init__(self, runtime: Runtime, limit_nbytes: int, staging: StagingPool | None, norms: GradNorm) -> None:
        """`limit_nbytes`: the most bytes in flight; above it, autograd's thread waits for the oldest gradients.
        `staging`: buffers for sums in host memory."""
        self._accelerator, self._recorder, self._ledger = runtime.accelerator, runtime.recorder, runtime.ledger
        self._span = runtime.accelerator.timer(runtime.recorder)
        self._limit_nbytes = limit_nbytes
        self._staging = staging
        self._norms = norms
        self._open: GradientBatch | None = None
        self._batches: deque[GradientBatch] = deque()
        """Batches that were sent and have not ended, oldest first."""
        self._in_flight_nbytes = 0
        """The bytes of gradients in the open batch and in `_batches`."""
        self._transferred: deque[GradientBatch] = deque()
        """Batches whose transfers have ended and whose gradients are not freed yet, oldest first."""
        self._transferred_nbytes = 0

    def send(self, gradients: UnitGradients, arrival: Arrival, *, measures: bool) -> None:
        """Add a gradient to the open batch of its unit, and send the batch if it is full. If too many bytes are in
        flight, first wait for the oldest gradients. `measures`: whether to compute the gradient's norm."""
        nbytes, batch = arrival.source.nbytes, self._open
        sums = self._staging if arrival.adds and not arrival.source.is_cpu else None
        if batch is not None and (
            batch.gradients is not gradients
            or batch.measures != measures
            or (sums is not None and batch.nbytes + nbytes > sums.buffer_nbytes)
        ):
            self.flush()
        held_nbytes = self._in_flight_nbytes + self._transferred_nbytes
        if self._open is None or held_nbytes + nbytes > self._limit_nbytes:
            self._wait(max(0, self._limit_nbytes - nbytes))
        if (batch := self._open) is None:
            batch = self._open = gradients.last = GradientBatch(gradients, measures, self.flush)
        batch.arrivals.append(arrival)
        batch.nbytes += nbytes
        self._in_flight_nbytes += nbytes
        if batch.nbytes >= (BATCH_NBYTES if sums is None else sums.buffer_nbytes):
            self.flush()

    def flush(self) -> None:
        """Send the open batch, if there is one."""
        batch, self._open = self._open, None
        if batch is None:
            return
        self._ledger.charge("device", "gradient_in_flight", batch.nbytes)
        if batch.measures and not batch.arrivals[0].source.is_cpu:
            self._measure_on_device(batch)
        after, holds = [self._accelerator.record_compute()], [arrival.source for arrival in batch.arrivals]
        batch.job = batch.gradients.submit(self._accelerator.lane("reduce"), partial(self._bring, batch), after, holds)
        self._batches.append(batch)

    def _measure_on_device(self, batch: GradientBatch) -> None:
        """Start to compute the norms of the batch's gradients on the device. Skip gradients that are added to earlier
        ones."""
        new = [arrival for arrival in batch.arrivals if not arrival.adds]
        norms = self._norms.on_device([arrival.source for arrival in new])
        batch.gradients.norms.update((arrival.index, norm) for arrival, norm in zip(new, norms, strict=True))

    def _bring(self, batch: GradientBatch) -> None:
        """Launch the copies from a batch to the unit's flat. Wait only for a window (host buffer) of a flat on NVMe,
        and for gradients to add or convert in host memory. Runs on the reduce lane."""
        gradients, norms = batch.gradients, batch.gradients.norms
        on_device = not batch.arrivals[0].source.is_cpu
        for arrival in batch.arrivals:
            if arrival.adds or not on_device or not batch.measures:  # else `_measure_on_device` has set the norm
                norms.pop(arrival.index, None)
        with (
            gradients.opened("reduce") as flat,
            self._span("reduce", "reduce", gradients.unit.name, batch.nbytes),
        ):
            copies = [
                GradCopy(index=each.index, target=flat[each.place], source=each.source, adds=each.adds)
                for each in batch.arrivals
            ]
            if not on_device and self._norms.fuses(copies):
                measured = self._norms.copy(copies)
                if batch.measures:
                    norms.update({copy.index: norm for copy, norm in zip(copies, measured, strict=True)})
                return
            sums: list[GradCopy] = []
            for copy in copies:
                if copy.adds or copy.target.dtype != copy.source.dtype:
                    sums.append(copy)
                else:
                    self._accelerator.copy(copy.target, copy.source)
            self._add(sums)
            if batch.measures:
                left = {copy.index: copy.target for copy in copies if copy.adds or not on_device}
                norms.update(zip(left, self._norms.in_memory(list(left.values())), strict=True))

    def receive(self, source: torch.Tensor, target: torch.Tensor, *, adds: bool, divisor: float) -> None:
        """Divide `source` [n] in place by `divisor`, then copy or add it to `target`. Runs on the reduce lane."""
        if source.is_cpu and target.is_cpu:
            copy_or_add(source, target, adds=adds, divisor=divisor)
            return
        if divisor != 1.0:
            source.div_(divisor)
        if not target.is_cpu:
            source = source.to(target.device)
            target.add_(source) if adds else target.copy_(source)
        elif not adds and source.dtype == target.dtype:
            self._accelerator.copy(target, source)
        else:
            self._add([GradCopy(index=-1, target=target, source=source, adds=adds)])

    def _add(self, copies: Sequence[GradCopy]) -> None:
        """Copy the gradients in `copies` through staging buffers to their targets in host memory, or add them to the
        targets. One buffer is filled while the content of another is copied or added. Runs on the reduce lane."""
        coming: deque[_Load] = deque()
        try:
            for parts in self._loads(copies):
                assert self._staging is not None, "sums in host memory are planned with a staging buffer"
                if len(coming) == self._staging.count:
                    self._add_oldest(coming)
                lease = self._staging.lease(self._staging.buffer_nbytes, "gradient", "reduce")
                coming.append(load := _Load(lease=lease))
                for place, part in parts:
                    source = lease.tensor[place : place + part.source.nbytes].view(part.source.dtype)
                    self._accelerator.copy(source, part.source)
                    load.parts.append(replace(part, source=source))
                load.arrival = self._accelerator.record()
            while coming:
                self._add_oldest(coming)
        finally:
            if coming:
                self._accelerator.record().wait()
            for load in coming:
                load.lease.release()

    def _loads(self, copies: Sequence[GradCopy]) -> Iterator[list[tuple[int, GradCopy]]]:
        """Cut `copies` into parts that fit into staging buffers. Yield for each buffer a list of pairs: the part's
        first byte in the buffer, and the part."""
        room = 0 if self._staging is None else self._staging.buffer_nbytes
        parts: list[tuple[int, GradCopy]] = []
        used = 0
        for copy in copies:
            itemsize, start = copy.source.itemsize, 0
            while start < copy.source.numel():
                if (numel := min((room - used) // itemsize, copy.source.numel() - start)) <= 0:
                    yield parts
                    parts, used = [], 0
                    continue
                stop = start + numel
                parts.append((used, replace(copy, target=copy.target[start:stop], source=copy.source[start:stop])))
                used, start = align_up(used + numel * itemsize, STAGED_ALIGNMENT), stop
        if parts:
            yield parts

    def _add_oldest(self, coming: deque[_Load]) -> None:
        coming[0].arrival.wait()
        if self._norms.fuses(coming[0].parts):
            self._norms.copy_threaded(coming[0].parts)
        else:
            for part in coming[0].parts:
                copy_or_add(part.source, part.target, adds=part.adds)
        coming.popleft().lease.release()

    def end_backward(self) -> None:
        """Wait until at most `limit_nbytes` are in flight, and free gradients that have arrived. Raises transfer
        errors."""
        self.flush()
        self._wait(self._limit_nbytes)
        self._free(0, 0)

    def wait_all(self) -> None:
        """Block until every transfer has ended. If a transfer has failed, raise its error; other transfers may still
        run."""
        self._wait(-1)  # -1: also for transfers of 0 bytes

    def drain(self) -> None:
        """Wait for every transfer, even if some fail, then raise the first error."""
        failure: Exception | None = None
        while self._batches or self._open is not None:  # each failure ends one wait, and its batch is removed
            try:
                self.wait_all()
            except Exception as error:
                failure = failure or error
        self._free(0, 0)
        if failure is not None:
            raise failure

    def clear(self) -> None:
        """Free all gradients, including those that a failed wait has left. The lanes must be idle."""
        for batch in (*self._batches, *self._transferred):
            batch.arrivals.clear()
        self._open = None
        self._batches.clear()
        self._transferred.clear()
        self._in_flight_nbytes = self._transferred_nbytes = 0
        self._ledger.correct("device", "gradient_in_flight", 0)

    def _wait(self, allowed_nbytes: int) -> None:
        """Wait for the oldest batches, and free their gradients, until at most `allowed_nbytes` of gradients are
        left."""
        while self._batches or self._open is not None:
            is_over = self._in_flight_nbytes > allowed_nbytes
            if not self._batches:
                if not is_over:
                    break
                self.flush()
            oldest = self._batches[0]
            if not oldest.done():
                if not is_over:
                    break
                with self._recorder.span("compute", "wait_grad"):
                    wait_quietly(self._awaited(allowed_nbytes))
            self._batches.popleft()
            self._in_flight_nbytes -= oldest.nbytes
            self._transferred.append(oldest)
            self._transferred_nbytes += oldest.nbytes
            oldest.wait()  # returns at once, or raises
        self._free(NUM_KEPT, allowed_nbytes - self._in_flight_nbytes)

    def _awaited(self, allowed_nbytes: int) -> Transfer:
        """Return the batch to wait for when more than `allowed_nbytes` are in flight."""
        if allowed_nbytes < 0:  # nothing may stay in flight
            return self._batches[-1]
        oldest = self._batches[0]
        if oldest.gradients is self._batches[-1].gradients:  # all are of one unit: the others go on
            return oldest
        # the last batch of the oldest unit
        return next(batch for batch in reversed(self._batches) if batch.gradients is oldest.gradients)

    def _free(self, num_kept: int, allowed_nbytes: int) -> None:
        """Free transferred batches, oldest first, until at most `num_kept` batches of `allowed_nbytes` in total are
        left. Does not wait."""
        while len(self._transferred) > num_kept or (self._transferred and self._transferred_nbytes > allowed_nbytes):
            freed = self._transferred.popleft()
            freed.arrivals.clear()
            self._transferred_nbytes -= freed.nbytes
            self._ledger.discharge("device", "gradient_in_flight", freed.nbytes)
