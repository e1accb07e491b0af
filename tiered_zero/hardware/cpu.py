"""The CPU as a device: lanes are threads, and a missing wait or a broken budget fails without a GPU."""

from __future__ import annotations

import ctypes
import logging
from typing import final

import torch

from tiered_zero.hardware.accelerator import Event, MemoryFigures
from tiered_zero.hardware.lanes import DeviceMarker, JobEvent, LaneAccelerator, Pace, Work, WorkerLane
from tiered_zero.hardware.probe import available_host_nbytes

logger = logging.getLogger("tiered_zero")


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy contiguous CPU tensors of one dtype and size on the calling thread alone, without the GIL.

    Tensor.copy_ would give each lane's thread an OpenMP team beside compute's, and torch.set_num_threads(1) in a lane
    would also bind every thread that starts later. Raises ValueError, also where the storage was emptied.
    """
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise ValueError(f"copy_bytes needs equal dtypes and sizes, not {_describe(target)} and {_describe(source)}")
    for tensor in (target, source):
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or end > tensor.untyped_storage().nbytes():
            raise ValueError(f"copy_bytes needs contiguous CPU tensors whose bytes are there, not {_describe(tensor)}")
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


@final
class CpuAccelerator(LaneAccelerator):
    """Compute is the calling thread itself: what it launched is complete, and waiting means blocking it.

    `delay_seed`: every job starts and ends late by a seeded, pseudo-random time. `poison`: freed memory becomes NaN.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(
        self, memory_limit_nbytes: int | None = None, poison: bool = False, delay_seed: int | None = None
    ) -> None:
        super().__init__(poison)
        self._memory_limit_nbytes = memory_limit_nbytes
        self._delay_seed = delay_seed
        self._told_pin = False

    def _build_lane(self, name: str) -> WorkerLane:
        return WorkerLane(name, _launch, None if self._delay_seed is None else Pace(self._delay_seed, name))

    def record_compute(self) -> JobEvent:
        return JobEvent.launched()

    def wait_on_compute(self, event: Event) -> None:
        event.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        copy_bytes(target, source)

    def total_memory_nbytes(self) -> int:
        return available_host_nbytes() if self._memory_limit_nbytes is None else self._memory_limit_nbytes

    def memory_figures(self) -> MemoryFigures | None:
        return None

    def pin(self, address: int, nbytes: int) -> bool:
        if not self._told_pin:
            self._told_pin = True
            logger.info("host memory is pageable: the device is the CPU, which needs no pinned memory")
        return False

    def unpin(self, address: int) -> None:
        """Nothing was pinned."""


def _launch(work: Work) -> DeviceMarker | None:
    work.job()
    return None


def _describe(tensor: torch.Tensor) -> str:
    layout = "" if tensor.is_contiguous() else " not contiguous,"
    nbytes = tensor.untyped_storage().nbytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} ({tensor.device},{layout} storage of {nbytes} B)"
