"""Define the interface of a device, and the CPU as one: lanes that run jobs during compute, and memory for units.

[Note: Lanes] A lane is a worker thread with its own device stream: `fetch` carries parameters to the device, `reduce`
carries gradients to the host. A job is a plain function; it may first wait for a disk transfer, and then launches
copies. Submitting a job returns a transfer; the consumer of the bytes waits for it. `after` lists transfers for which a
job waits. Their jobs were submitted earlier, and a lane runs its jobs in order, so lanes cannot deadlock through
`after`. A job that waits inside its own function has no such protection.

The driver thread (or autograd's) is the `compute` lane. `record_compute` returns a transfer for all that compute has
launched so far, and `wait_on_compute` orders compute's later launches after a transfer. Between streams, an event sets
this order without blocking the host. For a disk's transfer, and on the CPU, the host waits.

Both calls raise InternalError on a lane's thread, because the current stream there is not compute's. If a lane's job
must come after compute, the driver calls `record_compute` and passes the result as `after`.

The user may have set torch modes on compute's thread. This package's own work runs there without these modes
(`runs_outside_modes`).
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import time
import traceback
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from operator import itemgetter
from queue import SimpleQueue
from types import TracebackType
from typing import ParamSpec, TypeVar, final

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.errors import EngineFailedError, InternalError, PlanError, RankError
from tiered_zero.hardware.memory.huge_pages import HugePagePool, PageRange
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.telemetry.spans import Recorder

logger = logging.getLogger("tiered_zero")

Job = Callable[[], None]


class _ThisThread(threading.local):
    """State of the calling thread. `is_lane`: whether it belongs to a lane."""

    is_lane = False


THIS_THREAD = _ThisThread()


def on_lane_error(call: str) -> InternalError:
    """Return the error for a lane's thread that has made `call`. Only the thread that runs the model may make this
    call."""
    return InternalError(
        f"{call} was called on {threading.current_thread().name}, whose current stream is not compute's. This is "
        "an error in tiered_zero, not in the model: please report it with this message."
    )


@final
class EventMarker:
    """A point in a device's stream: a recorded event for which several threads may wait. Only one thread at a time
    waits for the device; the others wait for that thread."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event
        self._waiting = threading.Lock()
        self._is_complete = False

    def query(self) -> bool:
        self._is_complete = self._is_complete or self.event.query()
        return self._is_complete

    def synchronize(self) -> None:
        if self.query():
            return
        with self._waiting:
            if not self.query():
                self.event.synchronize()
                self._is_complete = True


@dataclass(slots=True, kw_only=True)
class Failure:
    """The error of a failed job. Transfers of jobs that waited for the failed job share this object."""

    error: BaseException
    traceback: TracebackType | None
    collected: bool = False  # a transfer has raised the error


_LAUNCHED = threading.Event()
"""An event that is already set, for transfers that are made after their jobs were launched."""

_LAUNCHED.set()


class LaneTransfer(Transfer):
    """The transfer of a lane's job. The host launches the job, and then puts a marker into the stream. The job is
    complete when the device reaches this marker. On the CPU there is no marker: a job is complete once it is
    launched."""

    def __init__(
        self,
        marker: EventMarker | None = None,
        failure: Failure | None = None,
        launched: threading.Event = _LAUNCHED,
    ) -> None:
        """Make the transfer of a job. `marker`: the event that the device reaches when the job is complete; None
        without a device. `launched`: an event that is set when `marker` and `failure` are known."""
        self.marker, self.failure = marker, failure
        self._launched = launched

    def finish_launch(self, marker: EventMarker | None, failure: Failure | None) -> None:
        """Set marker and failure, then `launched`. The lane's thread calls this once."""
        self.marker, self.failure = marker, failure
        self._launched.set()

    def wait_launched(self) -> Failure | None:
        """Block until the job was launched or failed. Return its failure, or None."""
        if not self._launched.is_set():
            self._await_launch()
        return self.failure

    def check_launched(self) -> None:
        """Block until the job was launched or failed. If it failed, raise its error."""
        if not self._launched.is_set():
            self._await_launch()
        if (failure := self.failure) is not None:
            failure.collected = True
            # it may be raised several times: reset its traceback to where it happened
            raise failure.error.with_traceback(failure.traceback)

    def _await_launch(self) -> None:
        self._launched.wait()

    def done(self) -> bool:
        return self._launched.is_set() and (self.marker is None or self.marker.query())

    def wait(self) -> None:
        if not self._launched.is_set() or self.failure is not None:  # in this order: the failure is set first
            self.check_launched()
        if self.marker is not None and not self.marker.query():  # query first: synchronize puts the thread to sleep
            self.marker.synchronize()


@dataclass(slots=True, kw_only=True)
class Work:
    """A job in a lane's queue."""

    job: Job
    after: Sequence[Transfer]  # the job is launched after theirs, if none of them failed
    holds: Sequence[torch.Tensor]  # referenced until the job is launched


Launch = Callable[[Work], EventMarker | None]
"""A function that runs the job of a `Work` on the calling thread. The device begins the job after the transfers in
`work.after`. Returns a marker that the device reaches at the job's end; None without a device. May raise."""


def run_job(work: Work) -> None:
    """Run a job that is complete when it returns. This is the `Launch` function of lanes without a stream."""
    work.job()


class DelayInjector:
    """Sleeps for seeded random times before and after jobs, so that a missing wait shows in tests. Used by one
    thread."""

    def __init__(self, seed: int, lane: str) -> None:
        self._random = random.Random(f"{seed}/{lane}")

    def delay(self) -> None:
        """Sleep for a random time. Of 20 calls, 8 do not sleep, 11 sleep up to 300 us, and 1 sleeps 1 to 3 ms."""
        draw = self._random.random()
        if draw >= 0.95:
            time.sleep(self._random.uniform(1e-3, 3e-3))
        elif draw >= 0.4:
            time.sleep(self._random.uniform(0.0, 300e-6))


class Lane:
    """An ordered queue of jobs, and the thread that launches them. A failed job does not stop later ones. `inline`:
    whether the submitting thread itself runs a job that waits for nothing, if the lane is idle."""

    def __init__(self, name: str, launch: Launch, delays: DelayInjector | None = None, inline: bool = False) -> None:
        self.name = name
        self._inline = inline
        self._launch = launch
        self._delays = delays
        self._queue: SimpleQueue[tuple[Work, LaneTransfer] | None] = SimpleQueue()
        self._failures: list[Failure] = []
        self._closed = False
        self._lock = threading.Lock()
        self._num_queued = 0
        self._running = threading.RLock()  # held while a job runs, on whichever thread
        self._thread = threading.Thread(target=self._run, name=f"tiered_zero {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # ulimit -u or -v
            raise PlanError(
                f"The thread of lane {name} cannot be started: {error}. Raise the limit of processes (ulimit -u) or of "
                "address space (ulimit -v)."
            ) from error

    def submit(
        self,
        job: Job,
        after: Sequence[Transfer] = (),
        holds: Sequence[torch.Tensor] = (),
        waits: bool = True,
        transfer: LaneTransfer | None = None,
    ) -> LaneTransfer:
        """Queue `job` to run on this lane's thread and stream, after all earlier jobs and the transfers in `after`. Any
        thread may use it. Return a transfer that is done when the job is complete on the device.

        `holds`: device tensors that the job reads or writes. Free their memory only after `wait_on_compute(transfer)`
        or `transfer.wait()`: the allocator knows only compute's stream. `waits`: whether the job waits for anything
        besides `after`. If not, the calling thread may run the job itself on the CPU. `transfer`: a new object of a
        subclass of LaneTransfer to use for the job; None: make one.
        """
        work = Work(job=job, after=[each for each in after if each is not COMPLETED], holds=tuple(holds))
        with self._lock:  # so that nothing is queued after the end mark
            if self._closed:
                raise RuntimeError(f"lane {self.name} is closed; jobs are submitted before the accelerator is closed")
            # The lane's thread would take a core from compute.
            runs_now = self._inline and not waits and not self._num_queued and transfer is None
            for earlier in work.after:
                runs_now = runs_now and earlier.done()
            if not runs_now:
                self._num_queued += 1
                queued = transfer or LaneTransfer(launched=threading.Event())
                self._queue.put((work, queued))
                return queued
        with self._running:
            marker, failure = self._perform(work)
        if failure is not None and not isinstance(failure.error, Exception):
            failure.collected = True
            raise failure.error  # Ctrl-C ends the call that it interrupts, not the later one that waits for this job
        return LaneTransfer(marker, failure)

    def close(self) -> None:
        """Finish queued jobs and stop the thread. Log the errors that no wait has raised. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()
        for failure in self._failures:
            # every call to other ranks raises their failure; the cause of the other was reported
            if not failure.collected and not isinstance(failure.error, RankError | EngineFailedError):
                failure.collected = True
                exc_info = (type(failure.error), failure.error, failure.traceback)
                logger.error("a job on lane %s failed and was not waited for", self.name, exc_info=exc_info)
        self._failures.clear()

    def _run(self) -> None:
        THIS_THREAD.is_lane = True
        while (queued := self._queue.get()) is not None:
            work, transfer = queued
            with self._running:
                marker, failure = self._perform(work)
            with self._lock:
                self._num_queued -= 1
            del work, queued  # free what the job holds before its transfer completes
            if failure is not None:
                traceback.clear_frames(failure.traceback)  # and what the frames of a failed job hold
            transfer.finish_launch(marker, failure)
            del transfer, marker, failure

    def _perform(self, work: Work) -> tuple[EventMarker | None, Failure | None]:
        marker: EventMarker | None = None
        failure: Failure | None = None
        try:
            for earlier in work.after:
                if not isinstance(earlier, LaneTransfer):
                    earlier.wait()
                elif (failure := earlier.wait_launched()) is not None:
                    return None, failure
            if self._delays is not None:
                self._delays.delay()
            marker = self._launch(work)
        except BaseException as error:
            failure = Failure(error=error, traceback=error.__traceback__)
            self._failures = [old for old in self._failures if not old.collected] + [failure]
        if self._delays is not None:
            self._delays.delay()
        return marker, failure


# -- the interface -----------------------------------------------------------------------------------------------------


Timer = Callable[[str, str, str, int], AbstractContextManager[None]]
"""(lane, kind, name, nbytes) -> a context manager that records a span."""


class Accelerator(ABC):
    """The device that computes."""

    device: torch.device
    shares_cores = False  # compute and the host's own work compete for processors
    pins = False  # copies to and from pinned memory are faster, and overlap compute

    def __init__(self, poison: bool) -> None:
        """Prepare the device. Lanes start at their first use. `poison`: whether to overwrite freed memory with NaN
        (debug mode)."""
        self._poison = poison
        self._lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _build_lane(self, name: str) -> Lane: ...

    def lane(self, name: str) -> Lane:
        """Return the lane called `name`; start it at first use."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self.device.type} accelerator is closed; lane {name} cannot be had any more")
            if name not in self._lanes:
                self._lanes[name] = self._build_lane(name)
            return self._lanes[name]

    def check_compute(self) -> None:
        """Raise ModelError if the calling thread's stream is not compute's, or if a device graph is being captured.
        Used on the driver thread, when an engine call or a module's forward begins."""
        return

    @abstractmethod
    def record_compute(self) -> Transfer:
        """Return a transfer that is done when everything that compute has launched so far is complete. Call it on the
        driver's or autograd's thread; on a lane's thread it raises InternalError."""

    @abstractmethod
    def record(self) -> Transfer:
        """Return a transfer for everything that the calling thread has launched so far on its stream."""

    @abstractmethod
    def wait_on_compute(self, transfer: Transfer) -> None:
        """Make compute's later work wait for `transfer`. If the transfer failed, raise its error. Call it on the
        driver's or autograd's thread; on a lane's thread it raises InternalError. On the CPU, or for a disk's transfer,
        the call blocks until the transfer is done."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        """Launch a copy on the calling lane's stream. `target` and `source` are contiguous, with the same dtype and
        size. Autograd's version counters do not change. `finish`: whether to return only when the copy is complete, so
        that the host memory can be reused."""

    def timer(self, recorder: Recorder) -> Timer:
        """Return a function like `Recorder.span`. It measures the device's time for the work that a job launches in the
        `with` block."""
        return recorder.span

    def add_spans(self) -> None:
        """Record the spans of `timer` that the device has completed. Used on the driver thread, once per step."""
        return

    def release_cached_memory(self) -> None:
        """Release the memory that the device's allocator caches, before a failed allocation is retried."""
        return

    def synchronize(self) -> None:
        """Wait for all launched work. Used only for measurements, dropped steps and shutdown."""
        with self._lock:
            lanes = list(self._lanes.values())
        for transfer in [lane.submit(lambda: None) for lane in lanes]:
            transfer.wait()

    def reserve_place(self, nbytes: int, window_nbytes: int) -> PageRange | None:
        """Reserve addresses for a flat (the 1-D tensor of a unit) that is fetched and evicted. Return None if the
        device's allocator provides the flat's memory. `window_nbytes`: the most bytes that all such flats have on the
        device at one time."""
        return None

    def unit_memory(self) -> AbstractContextManager[None]:
        """Return a context manager in which to allocate flats that are fetched and evicted. A device with memory pools
        keeps these flats apart from activations. Used on the driver's or autograd's thread."""
        return nullcontext()

    def host_pages(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the pages that hold `flat`, the flat of a unit or shard, as [n] uint8. Return None if the disk cannot
        read directly into these pages."""
        return None

    def alias(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a second tensor with the memory of `flat`, for a collective. The collective's threads may hold the
        tensor a little longer than the call."""
        return flat.data

    def poison(self, flat: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Overwrite `flat` in debug mode: floating-point values with NaN, integers with a byte pattern. `dtype`: view
        `flat` as this dtype first."""
        if not self._poison:
            return
        flat = flat if dtype is None else flat.view(dtype)
        # .data has its own version counter, so views saved by autograd do not see a change
        if flat.is_floating_point() or flat.is_complex():
            flat.data.fill_(float("nan"))
        else:
            flat.data.view(torch.uint8).fill_(0xA5)

    def pin(self, address: int, nbytes: int) -> bool:
        """Pin host memory, so that the device copies it directly. Return False if that fails, or is not needed."""
        return False

    def unpin(self, address: int) -> None:
        """Unpin memory that `pin` has pinned."""
        return

    def close(self) -> None:
        """Finish every lane's jobs and stop the threads. Log the errors that no wait has raised. Idempotent."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()


# -- the CPU as the device -------------------------------------------------------------------------------------------


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target` without holding the GIL. Raises ValueError unless both are contiguous CPU tensors of
    the same dtype and size."""
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise ValueError(f"copy_bytes needs equal dtypes and sizes, not {_describe(target)} and {_describe(source)}")
    for tensor in (target, source):
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or end > tensor.untyped_storage().nbytes():
            raise ValueError(f"copy_bytes needs contiguous CPU tensors whose bytes are there, not {_describe(tensor)}")
    if THIS_THREAD.is_lane:  # Tensor.copy_ would start an OpenMP team for each lane
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.data.copy_(source)  # .data: autograd's version counters do not change


@final
class CpuAccelerator(Accelerator):
    """The CPU as the device. Compute runs on the calling thread, and a wait blocks this thread. `delay_seed`: the seed
    of random delays before and after each job, which simulate a separate device."""

    device = torch.device("cpu")

    def __init__(self, poison: bool = False, delay_seed: int | None = None) -> None:
        super().__init__(poison)
        self._delay_seed = delay_seed
        self.shares_cores = delay_seed is None
        self._page_pool: HugePagePool | None = None
        self._places: list[tuple[int, torch.Tensor]] = []
        """(address, pages) of each range that `reserve_place` has reserved, sorted by address."""

    def _build_lane(self, name: str) -> Lane:
        delays = None if self._delay_seed is None else DelayInjector(self._delay_seed, name)
        return Lane(name, run_job, delays, inline=self.shares_cores)

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
        insort(self._places, (place.tensor.data_ptr(), place.pages), key=itemgetter(0))
        return place

    def host_pages(self, flat: torch.Tensor) -> torch.Tensor | None:
        index = bisect_right(self._places, flat.data_ptr(), key=itemgetter(0)) - 1
        if index < 0:
            return None
        address, pages = self._places[index]
        start, stop = flat.data_ptr() - address, flat.data_ptr() - address + align_up(flat.nbytes, PAGE_NBYTES)
        if start % PAGE_NBYTES or stop > pages.nbytes:
            return None
        return pages[start:stop]

    def alias(self, flat: torch.Tensor) -> torch.Tensor:
        if (pages := self.host_pages(flat)) is None:
            return super().alias(flat)
        # a storage of its own, so that it is not found as a view
        return torch.frombuffer(pages.numpy(), dtype=flat.dtype, count=flat.numel())

    def wait_on_compute(self, transfer: Transfer) -> None:
        if THIS_THREAD.is_lane:
            raise on_lane_error("wait_on_compute()")
        transfer.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        copy_bytes(target, source)

    def close(self) -> None:
        super().close()
        if self._page_pool is not None:
            self._page_pool.close()  # ranges that still exist keep it alive
        self._page_pool = None
        self._places.clear()


def _describe(tensor: torch.Tensor) -> str:
    layout = "" if tensor.is_contiguous() else " not contiguous,"
    nbytes = tensor.untyped_storage().nbytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} ({tensor.device},{layout} storage of {nbytes} B)"


# -- outside of the user's modes ---------------------------------------------------------------------------------------


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@contextmanager
def _outside_modes() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
        yield


def runs_outside_modes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Wrap `function` to run without the torch modes and torch.func transforms that the user has set on this thread."""

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        # A selective checkpoint, for example, must not count copies between tiers. This check takes 0.2 us.
        if not (_len_torch_function_stack() or _len_torch_dispatch_stack() or peek_interpreter_stack()):
            return function(*args, **kwargs)
        with _outside_modes():
            return function(*args, **kwargs)

    return run
