"""Gradients on their way from the device to host memory: back-pressure, and when their device memory is freed."""

from __future__ import annotations

from collections import deque
from typing import final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.grads.norms import GradNorm
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import ParamSpec

SUM_CHUNK_NUMEL = 1 << 15
"""Sums on the reduce lane go in chunks of so many elements: few enough for torch to stay on the lane's one thread."""

NUM_KEPT = 4
"""Transferred gradients kept before they are freed. Autograd's thread frees them, in order, so that every step meets
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


@final
class InFlightGradients:
    """Bounds the gradients on the device whose transfer has not ended. Driver or autograd's thread."""

    def __init__(self, runtime: Runtime, limit_nbytes: int, staging: StagingPool | None, norms: GradNorm) -> None:
        """`limit_nbytes`: autograd waits for the oldest when there are more. `staging`: where gradients are summed in
        host memory."""
        self._accelerator, self._recorder, self._ledger = runtime.accelerator, runtime.recorder, runtime.ledger
        self._limit_nbytes = limit_nbytes
        self._staging = staging
        self._norms = norms
        self._transfers: deque[tuple[Transfer, torch.Tensor]] = deque()
        self._transferred: deque[torch.Tensor] = deque()
        """Gradients that are to be freed, the oldest first."""

    def send(
        self,
        gradients: UnitGradients,
        spec: ParamSpec,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        adds: bool,
        measures: bool,
    ) -> None:
        """Send `source` [n], on the device, to `target` [n] in host memory, or add it there; wait for the oldest until
        there is room. `measures`: take its norm too."""
        accelerator, nbytes = self._accelerator, source.nbytes
        self._wait(max(0, self._limit_nbytes - nbytes))
        self._ledger.charge("device", "gradient_in_flight", nbytes)

        def send() -> None:
            with self._recorder.span("reduce", "reduce", spec.name, nbytes):
                gradients.norms.pop(spec.index, None)
                norm: torch.Tensor | None = None
                if self._norms.fuses_copy(target, source):
                    norm = self._norms.copy_with_norm(target, source, add=adds)
                elif not adds and target.dtype == source.dtype:
                    accelerator.copy(target, source, finish=measures)
                else:
                    self._add(target, source, adds)
                if measures:
                    gradients.norms[spec.index] = self._norms.of(target) if norm is None else norm

        after = [accelerator.record_compute()]
        gradients.last = accelerator.lane("reduce").submit(send, after=after, holds=[source], waits=False)
        self._transfers.append((gradients.last, source))

    def _add(self, target: torch.Tensor, source: torch.Tensor, adds: bool) -> None:
        """On the reduce lane: to host memory by way of a staging buffer, then into the fp32 sum."""
        assert self._staging is not None, "sums in host memory are planned with a staging buffer"
        step = self._staging.buffer_nbytes // source.element_size()
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            with self._staging.lease(part.nbytes, "gradient", lane="reduce") as lease:
                staged = lease.view(part.dtype, part.numel())
                self._accelerator.copy(staged, part, finish=True)
                land(staged, target[start:], adds=adds)

    def end_backward(self) -> None:
        """Wait until what is left is within the limit, and free the rest. Raises transfer errors."""
        self._wait(self._limit_nbytes)
        self._free(0, 0)

    def wait_all(self) -> None:
        """Block until every transfer has ended, those of empty gradients too. Raises the first error in a call."""
        self._wait(-1)

    def drain(self) -> None:
        """Wait for every transfer, whatever fails. Raises the first error."""
        failure: Exception | None = None
        for _ in range(len(self._transfers) + 1):  # each failure ends one wait
            try:
                self.wait_all()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def clear(self) -> None:
        """Free everything, also what a wait that failed has left. The lanes are idle."""
        self._transfers.clear()
        self._transferred.clear()
        self._ledger.correct("device", "gradient_in_flight", 0)

    def _wait(self, allowed_nbytes: int) -> None:
        """Wait for the oldest gradients until at most `allowed_nbytes` are in flight or not freed yet."""
        in_flight_nbytes = sum(source.nbytes for _, source in self._transfers)
        while self._transfers and (in_flight_nbytes > allowed_nbytes or self._transfers[0][0].done()):
            event, source = self._transfers.popleft()
            in_flight_nbytes -= source.nbytes
            self._transferred.append(source)
            with self._recorder.span("compute", "wait_grad"):
                event.wait()
        self._free(NUM_KEPT, allowed_nbytes - in_flight_nbytes)

    def _free(self, num_kept: int, allowed_nbytes: int) -> None:
        """Free the oldest transferred gradients until at most so many, and so many bytes, are left."""
        nbytes = sum(source.nbytes for source in self._transferred)
        while self._transferred and (len(self._transferred) > num_kept or nbytes > allowed_nbytes):
            freed_nbytes = self._transferred.popleft().nbytes
            nbytes -= freed_nbytes
            self._ledger.discharge("device", "gradient_in_flight", freed_nbytes)
