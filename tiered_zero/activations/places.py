"""Transfer saved activations to their place, a budget of bytes in host memory or on NVMe, and back."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Protocol, final

import torch

from tiered_zero.concurrency.transfer import Transfer, wait_all
from tiered_zero.errors import TieredZeroError
from tiered_zero.hardware.memory.blocks import BlockPool, HeapTrim
from tiered_zero.hardware.memory.staging import Lease, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.tier import BufferView, HostTier

LANE = "activations"
MAX_HOLES_NBYTES = 64 * MIB
"""The most bytes of holes to leave in malloc's heap if the CPU computes, see `HeapTrim`; less if less is in flight."""


class Place(Protocol):
    """Interface to the bytes of a budget. `write` and `read` run on the lane, in the order of their submission."""

    waits: bool
    """Whether a job waits for other things than earlier jobs, such as a disk."""

    def write(self, at: int, source: torch.Tensor) -> None:
        """Copy `source`, on the device, to the budget's bytes from `at`. When the job is complete `source` may be
        freed."""

    def read(self, at: int, target: torch.Tensor) -> None:
        """Copy the budget's bytes from `at` until `target` is full. `new_target` has made `target`."""

    def new_target(self, nbytes: int) -> torch.Tensor:
        """Return device memory that `read` can fill: [nbytes] uint8."""

    def finish(self) -> None:
        """Wait for every write. Raises the first error."""


@final
class HostPlace:
    """A place in one slot of host memory, which is pinned if the machine allows it."""

    waits = False

    def __init__(self, tier: HostTier, nbytes: int, runtime: Runtime) -> None:
        self._memory = tier.view(tier.reserve("activation", nbytes, "activation"))
        self._accelerator = runtime.accelerator

    def write(self, at: int, source: torch.Tensor) -> None:
        self._accelerator.copy(self._memory[at : at + source.numel()], source)

    def read(self, at: int, target: torch.Tensor) -> None:
        self._accelerator.copy(target, self._memory[at : at + target.numel()])

    def new_target(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._accelerator.device)

    def finish(self) -> None:
        """Do nothing: copies are complete when their jobs are."""


@final
class NvmePlace:
    """A place in one record of a swap store. Writes go through staging buffers and continue after their job. If the CPU
    computes, the disk reads straight into the target. Before bytes are read or written again, their earlier write is
    waited for."""

    waits = True

    def __init__(
        self, tier: NvmeTier, nbytes: int, in_flight_nbytes: int, staging: StagingPool, runtime: Runtime
    ) -> None:
        self._tier = tier
        self._slot = tier.reserve("activation", nbytes, "activation")
        self._staging = staging
        self._accelerator, self._recorder = runtime.accelerator, runtime.recorder
        self._targets = BlockPool(in_flight_nbytes) if runtime.accelerator.device.type == "cpu" else None
        self._heap = HeapTrim(min(in_flight_nbytes, MAX_HOLES_NBYTES))
        self._writes: deque[tuple[range, Transfer, Lease]] = deque()

    def write(self, at: int, source: torch.Tensor) -> None:
        if self._targets is not None:
            self._heap.add(source.numel())
        self._finish(range(at, at + source.numel()))
        for start in range(0, source.numel(), self._staging.buffer_nbytes):
            part = source[start : start + self._staging.buffer_nbytes]
            lease = self._lease(part.numel())
            try:
                self._accelerator.copy(lease.tensor[: part.numel()], part, finish=True)
                transfer = self._tier.write(self._slot, lease, at + start)
            except BaseException:
                lease.release()
                raise
            self._writes.append((range(at + start, at + start + part.numel()), transfer, lease))

    def read(self, at: int, target: torch.Tensor) -> None:
        self._finish(range(at, at + target.numel()))
        if self._targets is not None:
            self._heap.add(target.numel())
            self._wait(self._tier.read(self._slot, _pages(target), at, urgent=True))
            return
        reads: deque[tuple[torch.Tensor, Transfer, Lease]] = deque()
        try:
            for start in range(0, target.numel(), self._staging.buffer_nbytes):
                part = target[start : start + self._staging.buffer_nbytes]
                if not self._staging.num_free and reads:
                    self._land(*reads.popleft())
                lease = self._lease(part.numel())
                try:
                    reads.append((part, self._tier.read(self._slot, lease, at + start, urgent=True), lease))
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
        if self._targets is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._accelerator.device)
        return self._targets.take(nbytes)[:nbytes]

    def finish(self) -> None:
        if self._targets is not None:
            self._targets.trim()
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


def _pages(target: torch.Tensor) -> BufferView:
    """Return a target's memory in whole pages, as the pool has mapped them."""
    pages = torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())
    array: Any = pages.numpy()
    return BufferView(pages, memoryview(array))
