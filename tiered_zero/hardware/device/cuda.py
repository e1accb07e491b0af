"""A CUDA device: each lane's thread owns a stream, and events order streams without blocking the host."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.device.lanes import THIS_THREAD, Lane, LaneTransfer, Work, on_lane_error
from tiered_zero.sizes import format_nbytes

logger = logging.getLogger("tiered_zero")

HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


@final
class CudaAccelerator(Accelerator):
    """One CUDA device, by default the current one."""

    name = "cuda"

    def __init__(self, device: torch.device | None = None, poison: bool = False) -> None:
        """Raises ConfigError where there is no such device."""
        if not torch.cuda.is_available():
            raise ConfigError(
                "tiered_zero.device asks for CUDA; torch finds no CUDA device here. Set it to cpu, or install a CUDA "
                f"build of torch and its driver (this torch is {torch.__version__})."
            )
        super().__init__(poison)
        index = device.index if device is not None and device.index is not None else torch.cuda.current_device()
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"tiered_zero.device asks for cuda:{index}; there are {torch.cuda.device_count()} devices"
            )
        self.device = torch.device("cuda", index)
        self._compute = torch.cuda.current_stream(self.device)
        self._logged_pin = False

    def _build_lane(self, name: str) -> Lane:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

        def launch(work: Work) -> torch.cuda.Event:
            # first: a new thread's device is 0, and leaving the stream's context sets the thread's device again
            torch.cuda.set_device(self.device)
            # no record_stream(): a recorded block is reused only once the host sees the event done, so that a host
            # that runs ahead of the device would take new memory at each fetch. Every free is ordered by an event.
            with torch.cuda.stream(stream):
                for earlier in work.after:
                    _order(stream, earlier)
                try:
                    work.job()
                except Exception:
                    stream.synchronize()  # a failed job leaves nothing in flight
                    raise
                return _mark(stream)

        return Lane(name, launch)

    def check_compute(self) -> None:
        # the allocator gives freed memory out again in the order of the one stream that it was allocated on
        stream = torch.cuda.current_stream(self.device)
        if stream != self._compute:
            raise ModelError(
                f"The engine and its modules were expected to be called on the stream that was current as the engine "
                f"was made, {self._compute}; found {stream}. Call tiered_zero.initialize() inside of the same "
                "torch.cuda.stream(...) block, or forward, backward and step() outside of it."
            )

    def record_compute(self) -> LaneTransfer:
        if THIS_THREAD.is_lane:
            raise on_lane_error("record_compute()")
        return self.record()

    def record(self) -> LaneTransfer:
        return LaneTransfer(_mark(torch.cuda.current_stream(self.device)))

    def wait_on_compute(self, transfer: Transfer) -> None:
        if THIS_THREAD.is_lane:
            raise on_lane_error("wait_on_compute()")
        if isinstance(transfer, LaneTransfer):
            transfer.check_launched()
            _order(torch.cuda.current_stream(self.device), transfer)
        else:
            transfer.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        target.data.copy_(source.data, non_blocking=True)  # .data: see poison()
        if finish:
            torch.cuda.current_stream(self.device).synchronize()

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        super().synchronize()
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """End the lanes' threads, then wait for their copies: the memory that these use is freed next."""
        super().close()
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            logger.exception("waiting for the last work on %s failed", self.device)

    def pin(self, address: int, nbytes: int) -> bool:
        with torch.cuda.device(self.device):
            code = int(_runtime().cudaHostRegister(address, nbytes, HOST_REGISTER_PORTABLE))
        if code == 0:
            return True
        self._clear_error()
        if not self._logged_pin:
            self._logged_pin = True
            logger.warning(
                "host memory is pageable, so copies to and from the device are slow and do not overlap: "
                "pinning %s failed (%s)",
                format_nbytes(nbytes),
                torch.cuda.CudaError(code),
            )
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


def _order(stream: torch.cuda.Stream, transfer: Transfer) -> None:
    """Order what is launched on `stream` from now on after `transfer`, which was launched. Does not block."""
    if isinstance(transfer, LaneTransfer) and isinstance(transfer.marker, torch.cuda.Event):
        stream.wait_event(transfer.marker)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    marker = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting sleeps: the update needs the core
    marker.record(stream)
    return marker
