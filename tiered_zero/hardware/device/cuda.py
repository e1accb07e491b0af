"""What CUDA has beyond other accelerators: host memory of any origin is registered for direct copies."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, final

import torch

from tiered_zero.hardware.device.streams import StreamAccelerator

logger = logging.getLogger("tiered_zero")

HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


@final
class CudaAccelerator(StreamAccelerator):
    """One CUDA device; ROCm's builds of torch call theirs so, too."""

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
