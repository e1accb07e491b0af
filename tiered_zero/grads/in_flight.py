"""Move gradients from the device to host memory, limit how many bytes are under way, and free their device memory.

[Note: Waits for gradients]
Copies start as gradients come, and the host waits for a whole unit at a time: the lane's stream is in order, so waiting
for the last copy is enough. One of three waits first: autograd's thread, when there is no memory for a third unit's
gradients; the update, when it needs the gradients; or the write of a window (a buffer in host memory for one unit's
gradients on NVMe), before it starts. Later waits find the transfer complete. For sums in host memory the reduce lane
waits, buffer by buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer, wait_quietly
from tiered_zero.grads.check import GradCopy, GradNorm
from tiered_zero.grads.gradient import UnitGradients
from tiered_zero.hardware.memory.staging import Lease, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.sizes import align_up

SUM_CHUNK_NUMEL = 1 << 15
"""Elements that the reduce lane adds at once: so few that torch uses only the lane's own thread."""

BATCH_NBYTES = 1 << 20
"""Gradients of a unit are sent together once they reach this size or the unit's last gradient has come, because a job
of the lane costs more than the copy of a bias. Gradients that are added up in host memory are sent together once they
fill a staging buffer, because each such job waits."""

STAGED_ALIGNMENT = 64
"""Alignment in bytes of gradients in one staging buffer: a cache line."""

NUM_KEPT = 4
"""The number of transferred batches that are kept before they are freed. Autograd's thread frees them, in order, so
that every step finds the heap in the same state: when the reduce lane freed them, at varying times, they left holes of
25 MiB.
"""


def copy_or_add(source: torch.Tensor, target: torch.Tensor, *, adds: bool, divisor: float = 1.0) -> None:
    """Divide `source` [n] in place by `divisor`, and copy it to the first elements of `target`, or add it to them if
    `adds`. Runs on the reduce lane."""
    for low in range(0, source.numel(), SUM_CHUNK_NUMEL):
        chunk = source[low : low + SUM_CHUNK_NUMEL]
        into = target[low:][: chunk.numel()]
        if divisor != 1.0:
            chunk.div_(divisor)
        into.add_(chunk) if adds else into.copy_(chunk)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One gradient on its way to its home: `source` [n] of the parameter `index`, for elements `place` of its unit's
    flat. `adds`: add it to the gradient there, instead of replacing that."""

    index: int
    place: slice
    source: torch.Tensor
    adds: bool


@final
class GradientBatch(Transfer):
    """The transfer of gradients of one unit that one job moves to their home. The job is submitted ("sent") when the
    batch is full, when the unit's last gradient has come, or when the driver or autograd's thread waits for it.
    `measures`: whether to compute their norms too."""

    def __init__(self, gradients: UnitGradients, measures: bool, send: Callable[[], None]) -> None:
        """`send`: sends this batch, while it is open."""
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
    """One staging buffer in use. `parts`: the copies and sums to make from the buffer once `arrival` is done."""

    lease: Lease
    parts: list[GradCopy] = field(default_factory=list)
    arrival: Transfer = COMPLETED


@final
class InFlightGradients:
    """Sends gradients from the device to their homes, and limits the bytes of those whose transfer has not ended. Used
    on the driver thread or autograd's."""

    def __init__(self, runtime: Runtime, limit_nbytes: int, staging: StagingPool | None, norms: GradNorm) -> None:
        """`limit_nbytes`: the number of bytes beyond which autograd waits for the oldest gradients. `staging`: buffers
        for gradients that are added up in host memory."""
        self._accelerator, self._recorder, self._ledger = runtime.accelerator, runtime.recorder, runtime.ledger
        self._span = runtime.accelerator.timer(runtime.recorder)
        self._limit_nbytes = limit_nbytes
        self._staging = staging
        self._norms = norms
        self._open: GradientBatch | None = None
        self._batches: deque[GradientBatch] = deque()
        """Batches that were sent and have not ended, oldest first."""
        self._in_flight_nbytes = 0
        """Bytes of the open batch and of `_batches`."""
        self._transferred: deque[GradientBatch] = deque()
        """Batches that have ended and whose gradients are not freed yet, oldest first."""
        self._transferred_nbytes = 0

    def send(self, gradients: UnitGradients, arrival: Arrival, *, measures: bool) -> None:
        """Add a gradient to the open batch of its unit, which is sent now or with later gradients. If too many bytes
        are under way, wait for the oldest gradients first. `measures`: whether to compute its norm."""
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
        """Send the open batch, which was waiting for more gradients of its unit."""
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
        """Start to compute, on the device, the norms of the batch's gradients that are not added to others. (For
        gradients on the CPU the copy computes the norms in the same pass.)"""
        new = [arrival for arrival in batch.arrivals if not arrival.adds]
        norms = self._norms.on_device([arrival.source for arrival in new])
        batch.gradients.norms.update((arrival.index, norm) for arrival, norm in zip(new, norms, strict=True))

    def _bring(self, batch: GradientBatch) -> None:
        """Launch the copies of a batch, on the reduce lane. Wait only for gradients that are added up in host
        memory."""
        gradients, norms = batch.gradients, batch.gradients.norms
        on_device = not batch.arrivals[0].source.is_cpu
        for arrival in batch.arrivals:
            if arrival.adds or not on_device or not batch.measures:  # the others have been measured
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
        """Divide `source` [n] in place by `divisor`, and copy it to `target`, or add it if `adds`. Runs on the reduce
        lane, which waits for the device only to add in host memory."""
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
        """Make copies and sums in host memory through staging buffers: fill each buffer from the device, wait for it
        once, then copy or add its parts. With two buffers one is filled while the other is added. Runs on the reduce
        lane."""
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
        """Yield the parts of `copies` that fill one staging buffer, each with its first byte in the buffer."""
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
        """Wait until at most `limit_nbytes` are under way, and free all gradients whose transfers have ended. Raises
        transfer errors."""
        self.flush()
        self._wait(self._limit_nbytes)
        self._free(0, 0)

    def wait_all(self) -> None:
        """Block until every transfer has ended, including those of gradients without elements. Raises at most one
        error per call."""
        self._wait(-1)

    def drain(self) -> None:
        """Wait for every transfer even if some fail. Raises the first error."""
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
        """Wait for the oldest batches, and free their gradients, until at most `allowed_nbytes` are in flight or not
        freed yet."""
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
        """Return the batch to wait for when more than `allowed_nbytes` are in flight: the last batch of the oldest
        unit; the oldest batch if all are of one unit, so that the others go on; the very last batch if `allowed_nbytes`
        is negative and none may be left."""
        if allowed_nbytes < 0:
            return self._batches[-1]
        oldest = self._batches[0]
        if oldest.gradients is self._batches[-1].gradients:
            return oldest
        return next(batch for batch in reversed(self._batches) if batch.gradients is oldest.gradients)

    def _free(self, num_kept: int, allowed_nbytes: int) -> None:
        """Free the oldest transferred batches until at most `num_kept` batches, and at most `allowed_nbytes` bytes, are
        left."""
        while len(self._transferred) > num_kept or (self._transferred and self._transferred_nbytes > allowed_nbytes):
            freed = self._transferred.popleft()
            freed.arrivals.clear()
            self._transferred_nbytes -= freed.nbytes
            self._ledger.discharge("device", "gradient_in_flight", freed.nbytes)
