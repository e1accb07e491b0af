"""The CPU as the device: lanes are threads; a missing wait or an exceeded budget fails here without a GPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
from bisect import bisect_right, insort
from operator import itemgetter
from typing import final

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.device.lanes import THIS_THREAD, DelayInjector, DeviceMarker, Lane, Work, on_lane_error
from tiered_zero.hardware.memory.huge_pages import HugePagePool, PageRange
from tiered_zero.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES, align_up

logger = logging.getLogger("tiered_zero")

_LIBC = ctypes.CDLL(None)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between contiguous CPU tensors of one dtype and size, without the GIL.

    A lane's thread copies alone, any other thread with its OpenMP team.

    Tensor.copy_ would start another team for each lane, and torch.set_num_threads(1) in a lane would also bind every
    thread that starts later. Raises ValueError, also where the storage was emptied.
    """
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise ValueError(f"copy_bytes needs equal dtypes and sizes, not {_describe(target)} and {_describe(source)}")
    for tensor in (target, source):
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or end > tensor.untyped_storage().nbytes():
            raise ValueError(f"copy_bytes needs contiguous CPU tensors whose bytes are there, not {_describe(tensor)}")
    if THIS_THREAD.is_lane:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.data.copy_(source)  # .data: autograd's version counters stay


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Advise huge pages for the part of `memory` [any, CPU] that fills whole ones. Linux; else do nothing."""
    start, end = align_up(memory.data_ptr(), HUGE_PAGE_NBYTES), memory.data_ptr() + memory.nbytes
    nbytes = (end - start) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
    if nbytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


@final
class CpuAccelerator(Accelerator):
    """Compute on the calling thread: what it launched is complete, and a wait blocks it.

    `delay_seed`: every job starts and ends late by a seeded, pseudo-random time, as if the device were a machine of its
    own.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, poison: bool = False, delay_seed: int | None = None) -> None:
        super().__init__(poison)
        self._delay_seed = delay_seed
        self.shares_cores = delay_seed is None
        self._logged_pin = False
        self._page_pool: HugePagePool | None = None
        self._places: list[tuple[int, memoryview]] = []
        """(address, memory) of every place, by address."""

    def _build_lane(self, name: str) -> Lane:
        delays = None if self._delay_seed is None else DelayInjector(self._delay_seed, name)
        return Lane(name, _launch, delays, inline=self.shares_cores)

    def record_compute(self) -> Transfer:
        if THIS_THREAD.is_lane:
            raise on_lane_error("record_compute()")
        return COMPLETED

    def record(self) -> Transfer:
        return COMPLETED

    def reserve_place(self, nbytes: int, window_nbytes: int) -> PageRange | None:
        try:
            self._page_pool = self._page_pool or HugePagePool(window_nbytes)
            place = PageRange(self._page_pool, nbytes)
        except OSError as error:
            logger.info("paged parameters get memory from malloc each time: %s", error)
            return None
        insort(self._places, (place.tensor.data_ptr(), place.memory), key=itemgetter(0))
        return place

    def host_pages(self, flat: torch.Tensor) -> memoryview | None:
        index = bisect_right(self._places, flat.data_ptr(), key=itemgetter(0)) - 1
        if index < 0:
            return None
        address, memory = self._places[index]
        start, stop = flat.data_ptr() - address, flat.data_ptr() - address + align_up(flat.nbytes, PAGE_NBYTES)
        if start % PAGE_NBYTES or stop > memory.nbytes:
            return None
        return memory[start:stop]

    def alias(self, flat: torch.Tensor) -> torch.Tensor:
        pages = self.host_pages(flat)
        return super().alias(flat) if pages is None else torch.frombuffer(pages, dtype=flat.dtype, count=flat.numel())

    def prepare(self, flat: torch.Tensor) -> None:
        """Advise huge pages: a unit's memory is mapped twice a step, with a few page faults then, not thousands."""
        if self._page_pool is None:  # whose places are of huge pages
            advise_huge_pages(flat)
        if self._poison:
            self.poison(flat)

    def wait_on_compute(self, transfer: Transfer) -> None:
        if THIS_THREAD.is_lane:
            raise on_lane_error("wait_on_compute()")
        transfer.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        copy_bytes(target, source)

    def close(self) -> None:
        super().close()
        if self._page_pool is not None:
            self._page_pool.close()  # its ranges hold it as long as they are held
        self._page_pool = None
        self._places.clear()

    def pin(self, address: int, nbytes: int) -> bool:
        if not self._logged_pin:
            self._logged_pin = True
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
