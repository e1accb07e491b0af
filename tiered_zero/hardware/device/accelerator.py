"""Interface of a device: ordered lanes of work besides compute, and memory figures.

[Note: Lanes]
A lane is a worker thread with a device stream of its own: `fetch` carries parameters to the device, `reduce` carries
gradients to the host. A job is a plain function; it may first wait for a disk transfer (so nvme -> host -> device needs
no callback from an I/O worker) and then launches copies. Each job is a transfer, which its consumer waits for.
The driver thread (or autograd's) is the `compute` lane: `record_compute` marks what it has launched so far,
`wait_on_compute` orders everything that it launches from now on after a transfer. On the CPU both reduce to threading.
Transfers of lanes and marks of compute order streams; any other transfer (the disk's) is waited for on the host.

A mark is recorded where the work is launched. On a lane's thread the current stream is the lane's own, so a lane that
must come after compute is handed compute's mark by the driver: both calls are refused on a lane, and `record` marks
what the calling thread itself has launched.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import final

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.hardware.device.lanes import THIS_THREAD, DelayInjector, DeviceMarker, Lane, Work, on_lane_error
from tiered_zero.hardware.memory.huge_pages import HugePagePool, PageRange
from tiered_zero.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES, align_up
from tiered_zero.telemetry.spans import Recorder

Timer = Callable[[str, str, str, int], AbstractContextManager[None]]
"""(lane, kind, name, nbytes) -> the span of a `with` block."""


class Accelerator(ABC):
    """The device. `shares_cores`: compute and the host's own work take each other's time. `pins`: copies to and from
    host memory are faster, and beside compute, where that memory is pinned."""

    name: str
    device: torch.device
    shares_cores = False
    pins = False

    def __init__(self, poison: bool) -> None:
        """`poison`: debug mode, in which freed memory becomes NaN."""
        self._poison = poison
        self._lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _build_lane(self, name: str) -> Lane: ...

    def lane(self, name: str) -> Lane:
        """The lane of that name, started at first use."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self.name} accelerator is closed; lane {name} cannot be had any more")
            if name not in self._lanes:
                self._lanes[name] = self._build_lane(name)
            return self._lanes[name]

    def check_compute(self) -> None:
        """Raise ModelError where the calling thread's current stream is not compute's, the one that was current as the
        engine was made, and where a graph of the device is captured. Driver thread, as a call of the engine or the
        forward of one of its modules begins."""
        return

    @abstractmethod
    def record_compute(self) -> Transfer:
        """Mark everything that compute has launched so far. Driver or autograd's thread; InternalError on a lane."""

    @abstractmethod
    def record(self) -> Transfer:
        """Mark everything that the calling thread has launched on its own stream so far: compute's, or its lane's."""

    @abstractmethod
    def wait_on_compute(self, transfer: Transfer) -> None:
        """Order what compute launches from now on after `transfer`; raise its error. Driver or autograd's thread;
        InternalError on a lane.

        Blocks the host only as far as the device needs it to (on the CPU: until the transfer is done).
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        """Launch target <- source (contiguous, same dtype and size) on the calling lane's stream.

        `finish`: return only when the bytes are there, because the caller is about to reuse the host memory.
        Starts no threads and leaves autograd's version counters alone.
        """

    def timer(self, recorder: Recorder) -> Timer:
        """Return what times a block of a lane's job as a span of `recorder`, called as `Recorder.span` is: from the
        moment at which the device begins what the block launches to that at which it is complete."""
        return recorder.span

    def add_spans(self) -> None:
        """Give recorders the spans that the device has completed since. Driver thread, once a step."""
        return

    def release_cached_memory(self) -> None:
        """Return what the device's allocator keeps for reuse, before an allocation that failed is tried again."""
        return

    def synchronize(self) -> None:
        """Wait for everything launched. For measurements and shutdown only."""
        with self._lock:
            lanes = list(self._lanes.values())
        for transfer in [lane.submit(_nothing) for lane in lanes]:
            transfer.wait()

    def prepare(self, flat: torch.Tensor) -> None:
        """`flat` on the device has just been given memory, whose content is undefined: poisoned in debug mode."""
        self.poison(flat)

    def reserve_place(self, nbytes: int, window_nbytes: int) -> PageRange | None:
        """Reserve addresses for a flat that is fetched and evicted; all such flats hold at most `window_nbytes` at
        once. None where the device's allocator is to give it memory."""
        return None

    def unit_memory(self) -> AbstractContextManager[None]:
        """Return a block in which the device's allocator gives memory for flats that are fetched and evicted: apart
        from activations, where it can. Driver or autograd's thread."""
        return nullcontext()

    def host_pages(self, flat: torch.Tensor) -> memoryview | None:
        """The whole pages of `flat`, a unit's on the device or a shard of it, where the disk can write to them."""
        return None

    def alias(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat`, which has memory, as a tensor that does not count as a view of its storage where the memory
        has an owner of its own: what is handed to threads that let go of it at some later time."""
        return flat.data

    def poison(self, flat: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """In debug mode overwrite `flat`, taken as `dtype`, with NaN or, of integers, a pattern; else do nothing."""
        if not self._poison:
            return
        flat = flat if dtype is None else flat.view(dtype)
        # .data: a version counter of its own, so that views saved by autograd do not count this as a change
        if flat.is_floating_point() or flat.is_complex():
            flat.data.fill_(float("nan"))
        else:
            flat.data.view(torch.uint8).fill_(0xA5)

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> bool:
        """Register host memory for direct copies. False (once logged, with the reason) where it cannot be."""

    @abstractmethod
    def unpin(self, address: int) -> None: ...

    def close(self) -> None:
        """Finish every lane's jobs and stop the threads; errors that were not waited for are logged. Idempotent."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()


def _nothing() -> None:
    """The job whose completion says that every job before it is complete."""


# -- where the CPU is the device -------------------------------------------------------------------------------------


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
