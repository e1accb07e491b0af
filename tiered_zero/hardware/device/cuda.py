"""Run on CUDA: register host memory of any origin for direct copies, and give paged units their own allocator pool.

[Note: The pool of units] torch's allocator splits its blocks. If units and activations share them, activations soon
take parts of a block that a unit has freed, the next unit finds no block that is long enough, and more is reserved than
planned. A private pool gives its blocks to units alone: the next unit takes what one has freed, on the same stream, and
if units are alike the pool reserves no more than the window of paged parameters. `storage.resize_()` allocates from it,
too. Inside such a block torch neither releases its cache nor retries, so the caller of `fill()` does. If an allocation
outside the pool finds no memory, it gets what idle units have left in the pool (`use_on_oom`).
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, final

import torch

from tiered_zero.hardware.device.streams import StreamAccelerator

logger = logging.getLogger("tiered_zero")

HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


@final
class CudaAccelerator(StreamAccelerator):
    """One CUDA device; torch's ROCm builds use the same names."""

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        super().__init__(device, poison)
        self._unit_pool: torch.cuda.MemPool | None = None
        self._has_pool = True
        """False once the allocator has refused to make a pool."""

    def _current_stream(self) -> torch.Stream:
        return torch.cuda.current_stream(self.device)

    def _new_event(self) -> torch.Event:
        """Make an event whose waiter sleeps, since the update needs the core. torch.Event has that argument but ignores
        it here (c10::EventFlag 2.13 only has timing), so its waiter spins."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def unit_memory(self) -> AbstractContextManager[None]:
        if self._unit_pool is None and self._has_pool:
            self._open_pool()
        if self._unit_pool is None:
            return nullcontext()
        return torch.cuda.use_mem_pool(self._unit_pool, self.device)

    def _open_pool(self) -> None:
        """Make the pool of units. If the allocator cannot, log the reason once."""
        backend = torch.cuda.memory.get_allocator_backend()
        why = "" if backend == "native" else f"the allocator {backend} has no pools"
        try:
            if not why:
                with torch.cuda.device(self.device):
                    self._unit_pool = torch.cuda.MemPool(use_on_oom=True)
        except RuntimeError as error:
            why = str(error)
        if why:
            self._has_pool = False
            logger.warning(
                "paged units share the device allocator's blocks with activations, so more memory may be reserved than "
                "planned: %s. Leave backend out of PYTORCH_CUDA_ALLOC_CONF",
                why,
            )

    def release_cached_memory(self) -> None:
        """Release what units have freed, too: a pool is released with its owner. Units that have memory keep it."""
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
        """Launch a kernel that reports, and so clears, the error of a failed runtime call, before another kernel
        does."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
