"""Lend the memory of gradient buckets, a fixed number of which are reduced at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.hardware.runtime import Runtime


@final
class BucketMemory:
    """The memory of buckets, free or with a reduction under way. On the thread of the reducer.

    A bucket without memory waits for the oldest, which bounds the gradients on the device. Where parameters are
    gathered in backward, another rank may still lack some of its gradients of that one, and go on once both have
    gathered the next unit. So a rank that finds another one waiting in a gather leaves its buckets for the next
    gradient, or the end of backward.
    """

    def __init__(self, memory: Sequence[torch.Tensor], runtime: Runtime) -> None:
        """`memory`: [n] uint8 each."""
        self._runtime = runtime
        self.on_device = any(not each.is_cpu for each in memory)
        self._free = deque(memory)
        self._under_way: deque[tuple[torch.Tensor, Transfer, Transfer]] = deque()
        """Memory of a bucket, the reduction in it, and what frees it; the oldest first."""
        self._waits = True
        """Whether buckets of this backward wait for memory."""

    def close(self) -> None:
        """Drop the memory."""
        self._free.clear()
        self._under_way.clear()

    def begin_backward(self) -> None:
        """Let buckets wait for memory again."""
        self._waits = True

    def wait_available(self) -> bool:
        """Wait until there is memory: now, or once the oldest bucket is reduced. False where another rank has to gather
        first: then no bucket waits any more in this backward."""
        reduction = self._under_way[0][1] if not self._free else None
        if reduction is None or reduction.done():
            return True
        self._waits = self._waits and self._runtime.collectives.wait_reduced(reduction)
        return self._waits

    def take(self) -> torch.Tensor:
        """Take the memory of one bucket, however long it waits for the oldest."""
        if not self._free:
            self._finish_oldest()
        return self._free.popleft()

    def hold(self, memory: torch.Tensor, reduction: Transfer, received: Transfer) -> None:
        """Keep memory until its bucket's sums are at their homes: `received`, after `reduction`."""
        self._under_way.append((memory, reduction, received))

    def finish_all(self) -> None:
        """Wait until the sums of every bucket are at their homes."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait until the oldest bucket's sums are at their homes. On a device compute waits, which fills its memory
        next."""
        memory, _, received = self._under_way.popleft()
        with self._runtime.recorder.span("compute", "wait_grad"):
            if self.on_device:
                self._runtime.accelerator.wait_on_compute(received)
            else:
                received.wait()
        self._free.append(memory)
