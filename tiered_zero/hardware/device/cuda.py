"""What CUDA has beyond other accelerators: host memory of any origin is registered for direct copies, and paged units
have a pool of the allocator to themselves.

[Note: The pool of units]
torch's allocator splits its blocks. Where units and activations share them, a block that a unit has left is soon cut
for activations, the next unit finds none that is long enough, and more is reserved than planned. A private pool gives
its blocks to units alone: what one leaves the next one takes, on the same stream, and where units are alike the pool
reserves no more than the window of paged parameters. `storage.resize_()` allocates there as anywhere. Inside of such a
block torch neither gives back what it has cached nor tries again, so the caller of `fill()` does.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, suppress
from typing import Any, final

import torch

from tiered_zero.hardware.device.streams import StreamAccelerator

logger = logging.getLogger("tiered_zero")

HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


@final
class CudaAccelerator(StreamAccelerator):
    """One CUDA device; ROCm's builds of torch call theirs so, too."""

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        super().__init__(device, poison)
        self._unit_pool: torch.cuda.MemPool | None = None

    def _current_stream(self) -> torch.Stream:
        return torch.cuda.current_stream(self.device)

    def _new_event(self) -> torch.Event:
        """Make an event whose waiter sleeps, for the update needs the core: torch.Event has that argument, and leaves
        it out here (of c10::EventFlag 2.13 has timing alone), so that its waiter spins."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def unit_memory(self) -> AbstractContextManager[None]:
        if self._unit_pool is None:
            with torch.cuda.device(self.device):
                self._unit_pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._unit_pool, self.device)

    def release_cached_memory(self) -> None:
        """Give back what units have left, too: a pool does so as its owner drops it. Units that have memory keep it."""
        self._unit_pool = None
        super().release_cached_memory()

    def close(self) -> None:
        super().close()
        self._unit_pool = None

    def pin(self, address: int, nbytes: int) -> bool:
        with torch.cuda.device(self.device):
            code = int(_runtime().cudaHostRegister(address, nbytes, HOST_REGISTER_PORTABLE))
        if code == 0:
            return True
        self._clear_error()
        self._log_pageable(nbytes, str(torch.cuda.CudaError(code)))
        return False

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self.device):
            code = int(_runtime().cudaHostUnregister(address))
        if code != 0:
            self._clear_error()
            logger.error("unpinning host memory failed (%s)", torch.cuda.CudaError(code))

    def _clear_error(self) -> None:
        """Launch a kernel that reports, and so clears, the error of a failed runtime call before another one does."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
