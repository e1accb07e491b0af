"""Lend memory to gradient buckets, so that a fixed number is reduced at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.hardware.runtime import Runtime


@final
class BucketMemory:
    """The memory of buckets, each free or with a reduction under way. Used on the reducer's thread. A bucket without
    memory waits for the oldest, which bounds the gradients on the device."""

    def __init__(self, memory: Sequence[torch.Tensor], runtime: Runtime) -> None:
        """`memory`: for each bucket, [n] uint8."""
        self._runtime = runtime
        self.on_device = any(not each.is_cpu for each in memory)
        self._free = deque(memory)
        self._under_way: deque[tuple[torch.Tensor, Transfer]] = deque()
        """The memory of each bucket under way and the transfer that frees it, oldest first."""

    def close(self) -> None:
        """Drop the memory."""
        self._free.clear()
        self._under_way.clear()

    def take(self) -> torch.Tensor:
        """Take the memory of one bucket; wait for the oldest if none is free."""
        if not self._free:
            self._finish_oldest()
        return self._free.popleft()

    def hold(self, memory: torch.Tensor, received: Transfer) -> None:
        """Keep memory until `received`: its bucket's sums are at their homes."""
        self._under_way.append((memory, received))

    def finish_all(self) -> None:
        """Wait until the sums of every bucket are at their homes."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait until the oldest bucket's sums are at their homes. On a device make compute wait, which fills the memory
        next."""
        memory, received = self._under_way.popleft()
        with self._runtime.recorder.span("compute", "wait_grad"):
            if self.on_device:
                self._runtime.accelerator.wait_on_compute(received)
            else:
                received.wait()
        self._free.append(memory)
