"""Gradients on their way from the device to host memory: back-pressure, and when their device memory is freed.

[Note: Waits for gradients]
Copies leave as gradients come, and the host waits for those of a whole unit: the lane's stream is in order, so the last
one stands for all. Autograd's thread waits where a third unit's gradients find no room, the update where it needs them,
and a window of gradients on NVMe before it is written: the first of the three, for the others find the same transfer
complete. Sums in host memory are waited for buffer by buffer, on the lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer, wait_quietly
from tiered_zero.grads.norms import GradCopy, GradNorm
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.hardware.memory.staging import Lease, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.sizes import align_up

SUM_CHUNK_NUMEL = 1 << 15
"""Sums on the reduce lane go in chunks of so many elements: few enough for torch to stay on the lane's one thread."""

BATCH_NBYTES = 1 << 20
"""Gradients of one unit go together until they are so many bytes, or the unit's last one has come: a job of the lane
costs more than the copy of a bias. Those that are added up in host memory, until they fill a staging buffer: each is
waited for."""

STAGED_ALIGNMENT = 64
"""Of gradients in one staging buffer, in bytes: a cache line."""

NUM_KEPT = 4
"""Transferred batches kept before they are freed. Autograd's thread frees them, in order, so that every step meets
the same heap: freed by the reduce lane, at varying times, they left holes of 25 MiB in it.
"""


def land(source: torch.Tensor, target: torch.Tensor, *, adds: bool, divisor: float = 1.0) -> None:
    """Copy `source` [n], which `divisor` changes, to the first elements of `target`, or add it. On the reduce lane."""
    for low in range(0, source.numel(), SUM_CHUNK_NUMEL):
        chunk = source[low : low + SUM_CHUNK_NUMEL]
        into = target[low:][: chunk.numel()]
        if divisor != 1.0:
            chunk.div_(divisor)
        into.add_(chunk) if adds else into.copy_(chunk)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A gradient `source` [n] of the parameter `index`, for elements `place` of its unit's flat. `adds`: to those."""

    index: int
    place: slice
    source: torch.Tensor
    adds: bool


@final
class GradientBatch(Transfer):
    """Gradients of one unit that one job brings home. It is sent when it is full or complete, or as the driver or
    autograd's thread waits for it. `measures`: their norms are taken too."""

    def __init__(self, gradients: UnitGradients, measures: bool, send: Callable[[], None]) -> None:
        """`send`: sends the open batch."""
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
        if self.job is not None:  # else it was dropped
            self.job.wait()


@dataclass(eq=False, kw_only=True)
class _Load:
    """What one staging buffer holds: `parts` of gradients, whose sources are in it once `arrival` is done."""

    lease: Lease
    parts: list[GradCopy] = field(default_factory=list)
    arrival: Transfer = COMPLETED


@final
class InFlightGradients:
    """Bounds the gradients on the device whose transfer has not ended. Driver or autograd's thread."""

    def __init__(self, runtime: Runtime, limit_nbytes: int, staging: StagingPool | None, norms: GradNorm) -> None:
        """`limit_nbytes`: autograd waits for the oldest when there are more. `staging`: where gradients are summed in
        host memory."""
        self._accelerator, self._recorder, self._ledger = runtime.accelerator, runtime.recorder, runtime.ledger
        self._span = runtime.accelerator.timer(runtime.recorder)
        self._limit_nbytes = limit_nbytes
        self._staging = staging
        self._norms = norms
        self._open: GradientBatch | None = None
        self._batches: deque[GradientBatch] = deque()
        """Those that are sent, the oldest first."""
        self._in_flight_nbytes = 0
        """Of both."""
        self._transferred: deque[GradientBatch] = deque()
        """Those whose gradients are to be freed, the oldest first."""
        self._transferred_nbytes = 0

    def send(self, gradients: UnitGradients, arrival: Arrival, *, measures: bool) -> None:
        """Send a gradient, perhaps with the next ones of its unit; wait for the oldest until there is room."""
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
        """Send what waits for more gradients of its unit."""
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
        """Launch the norms of those whose targets will hold what was computed here. On the CPU they are taken in the
        pass that copies."""
        new = [arrival for arrival in batch.arrivals if not arrival.adds]
        norms = self._norms.on_device([arrival.source for arrival in new])
        batch.gradients.norms.update((arrival.index, norm) for arrival, norm in zip(new, norms, strict=True))

    def _bring(self, batch: GradientBatch) -> None:
        """On the reduce lane: launch the copies; wait for none but those that are added up in host memory."""
        gradients, norms = batch.gradients, batch.gradients.norms
        on_device = not batch.arrivals[0].source.is_cpu
        for arrival in batch.arrivals:
            if arrival.adds or not on_device or not batch.measures:  # others have been measured
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
        """Copy `source` [n], which `divisor` changes, to `target`, or add it there. On the reduce lane; the host waits
        for the device where they are added up in host memory."""
        if source.is_cpu and target.is_cpu:
            land(source, target, adds=adds, divisor=divisor)
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
        """On the reduce lane: to host memory by way of staging buffers, then into the fp32 sums. Each buffer is filled
        with all that it holds, and waited for once; where there are two, one is on its way while the other is added."""
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
        """Cut the copies into what a staging buffer holds: the first byte there, and the part."""
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
                land(part.source, part.target, adds=part.adds)
        coming.popleft().lease.release()

    def end_backward(self) -> None:
        """Wait until what is left is within the limit, and free the rest. Raises transfer errors."""
        self.flush()
        self._wait(self._limit_nbytes)
        self._free(0, 0)

    def wait_all(self) -> None:
        """Block until every transfer has ended, those of empty gradients too. Raises the first error in a call."""
        self._wait(-1)

    def drain(self) -> None:
        """Wait for every transfer, whatever fails. Raises the first error."""
        failure: Exception | None = None
        while self._batches or self._open is not None:  # each failure ends one wait, of a batch that is gone then
            try:
                self.wait_all()
            except Exception as error:
                failure = failure or error
        self._free(0, 0)
        if failure is not None:
            raise failure

    def clear(self) -> None:
        """Free everything, also what a wait that failed has left. The lanes are idle."""
        for batch in (*self._batches, *self._transferred):
            batch.arrivals.clear()
        self._open = None
        self._batches.clear()
        self._transferred.clear()
        self._in_flight_nbytes = self._transferred_nbytes = 0
        self._ledger.correct("device", "gradient_in_flight", 0)

    def _wait(self, allowed_nbytes: int) -> None:
        """Wait for the oldest batches until at most `allowed_nbytes` are in flight or not freed yet."""
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
        """The batch that is waited for where too much is in flight: the last of the oldest unit; the oldest, where all
        are of one unit, and its other gradients may go on; the last of all, where none is to be left."""
        if allowed_nbytes < 0:
            return self._batches[-1]
        oldest = self._batches[0]
        if oldest.gradients is self._batches[-1].gradients:
            return oldest
        return next(batch for batch in reversed(self._batches) if batch.gradients is oldest.gradients)

    def _free(self, num_kept: int, allowed_nbytes: int) -> None:
        """Free the oldest transferred batches until at most so many, and so many bytes, are left."""
        while len(self._transferred) > num_kept or (self._transferred and self._transferred_nbytes > allowed_nbytes):
            freed = self._transferred.popleft()
            freed.arrivals.clear()
            self._transferred_nbytes -= freed.nbytes
            self._ledger.discharge("device", "gradient_in_flight", freed.nbytes)
