"""Run on any device that torch.accelerator knows: each lane's thread owns a stream, and events order streams without
blocking the host. `CudaAccelerator` adds pinned host memory, and a memory pool for paged units.

[Note: The pool of units] torch's allocator splits its blocks. If units and activations share blocks, activations soon
take parts of a block that a unit has freed. The next unit then finds no block that is long enough, and more memory is
reserved than planned. A private pool gives its blocks only to units: the next unit takes the block that another unit
has freed. `storage.resize_()` allocates from the pool, too. If an allocation in the pool fails, torch does not release
its cache and retry, so the caller of `fill()` does this. If an allocation outside the pool finds no memory, it gets
free blocks of the pool (`use_on_oom`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.hardware.device.accelerator import (
    THIS_THREAD,
    Accelerator,
    EventMarker,
    Lane,
    LaneTransfer,
    Timer,
    Work,
    on_lane_error,
)
from tiered_zero.sizes import format_nbytes
from tiered_zero.telemetry.spans import Recorder

logger = logging.getLogger("tiered_zero")

MAX_PENDING = 1 << 14
"""The most spans that are kept until the end of a step. An evaluation has no steps, so its oldest spans are dropped."""

HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


class StreamAccelerator(Accelerator):
    """One device of the accelerator type (cuda, xpu, ...) that torch finds on this machine."""

    pins = True

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        """Find the device, and use its current stream for compute. `device`: without an index, the current device is
        used. Raises ConfigError if torch finds no such device."""
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != device.type:
            raise ConfigError(
                f"tiered_zero.device asks for {device.type}; this torch ({torch.__version__}) finds "
                f"{'only the CPU' if found is None else found.type}. Set it to "
                f"{'cpu' if found is None else found.type}, or install a build of torch for {device.type} and the "
                "driver of the device."
            )
        super().__init__(poison)
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        if index >= (count := torch.accelerator.device_count()):
            raise ConfigError(f"tiered_zero.device asks for {device.type}:{index}; there are {count} devices")
        self.device = torch.device(device.type, index)
        self._compute = torch.accelerator.current_stream(self.device)
        self._is_capturing = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", lambda: False)
        self._logged_pin = False
        self._clock = DeviceClock(self.device)

    def _build_lane(self, name: str) -> Lane:
        stream = torch.Stream(self.device)

        def launch(work: Work) -> EventMarker:
            # first: a new thread is on device 0, and leaving the stream's context sets the thread's device again
            torch.accelerator.set_device_index(self.device)
            # no record_stream(): a recorded block is reused only once the host sees the event done, so a host that
            # runs ahead of the device would allocate at each fetch. Events order every free.
            with stream:
                for earlier in work.after:
                    self._order(earlier)
                try:
                    work.job()
                except Exception:
                    stream.synchronize()  # a failed job leaves nothing in flight
                    raise
                return self._mark()

        return Lane(name, launch)

    def check_compute(self) -> None:
        if self._is_capturing():
            raise ModelError(
                f"Expected calls of the engine and its modules outside of a graph's capture on {self.device}: a graph "
                "replays the addresses that it has seen, and the memory of paged parameters moves. Leave out "
                'torch.cuda.graph(...), and compile the model without mode="reduce-overhead".'
            )
        # the allocator reuses freed memory in the order of the stream on which it was allocated
        stream = torch.accelerator.current_stream(self.device)
        if stream != self._compute:
            raise ModelError(
                f"The engine and its modules were expected to be called on the stream that was current as the engine "
                f"was made, {self._compute}; found {stream}. Call tiered_zero.initialize() inside of the same "
                f"torch.{self.device.type}.stream(...) block, or forward, backward and step() outside of it."
            )

    def record_compute(self) -> LaneTransfer:
        if THIS_THREAD.is_lane:
            raise on_lane_error("record_compute()")
        return self.record()

    def record(self) -> LaneTransfer:
        return LaneTransfer(self._mark())

    def wait_on_compute(self, transfer: Transfer) -> None:
        if THIS_THREAD.is_lane:
            raise on_lane_error("wait_on_compute()")
        if isinstance(transfer, LaneTransfer):
            transfer.check_launched()
            self._order(transfer)
        else:
            transfer.wait()

    def _current_stream(self) -> torch.Stream:
        """Return the calling thread's current stream, as an object that this device's events accept."""
        return torch.accelerator.current_stream(self.device)

    def _new_event(self) -> torch.Event:
        """Make an event for which the host can wait."""
        return torch.Event(self.device)

    def _mark(self) -> EventMarker:
        """Record an event on the calling thread's stream."""
        event = self._new_event()
        event.record(self._current_stream())
        return EventMarker(event)

    def _order(self, transfer: Transfer) -> None:
        """Make the calling thread's stream wait for `transfer`, whose job was launched. Does not block."""
        if isinstance(transfer, LaneTransfer) and transfer.marker is not None:
            transfer.marker.event.wait(self._current_stream())

    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        target.data.copy_(source.data, non_blocking=True)  # .data: see poison()
        if finish:
            torch.accelerator.current_stream(self.device).synchronize()

    def timer(self, recorder: Recorder) -> Timer:
        return partial(self._clock.span, recorder)

    def add_spans(self) -> None:
        self._clock.add_spans()

    def release_cached_memory(self) -> None:
        torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        super().synchronize()
        torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        """End the lanes' threads, then wait until the device has completed all copies, because the memory is freed
        next."""
        super().close()
        try:
            torch.accelerator.synchronize(self.device)
        except RuntimeError:
            logger.exception("waiting for the last work on %s failed", self.device)

    def pin(self, address: int, nbytes: int) -> bool:
        self._log_pageable(nbytes, f"torch has no call that registers host memory with {self.device.type}")
        return False

    def _log_pageable(self, nbytes: int, why: str) -> None:
        if not self._logged_pin:
            self._logged_pin = True
            logger.warning(
                "host memory is pageable, so copies to and from the device are slow and do not overlap: "
                "pinning %s failed (%s)",
                format_nbytes(nbytes),
                why,
            )


@final
class CudaAccelerator(StreamAccelerator):
    """One CUDA device; torch's ROCm builds use the same names."""

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        super().__init__(device, poison)
        self._unit_pool: torch.cuda.MemPool | None = None
        self._has_pool = True
        """False once the allocator has refused to make a memory pool for units."""

    def _current_stream(self) -> torch.Stream:
        return torch.cuda.current_stream(self.device)

    def _new_event(self) -> torch.Event:
        """Make an event. A thread that waits for this event sleeps, so that its core is free for the update."""
        # A thread that waits for a torch.Event spins: it ignores `blocking` (c10::EventFlag 2.13 only has timing).
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def unit_memory(self) -> AbstractContextManager[None]:
        if self._unit_pool is None and self._has_pool:
            self._open_pool()
        if self._unit_pool is None:
            return nullcontext()
        return torch.cuda.use_mem_pool(self._unit_pool, self.device)

    def _open_pool(self) -> None:
        """Make the pool for units. If the allocator cannot make one, log the reason once."""
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
        """Release the memory that the allocator caches, and the memory that units have freed. Units on the device keep
        their memory."""
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
        """Clear the error of a failed CUDA call: launch a kernel that raises the error, so that no later kernel raises
        it."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A span of a lane's time, between two events that the device may not have reached yet."""

    recorder: Recorder
    lane: str
    kind: str
    name: str
    nbytes: int
    start: torch.Event
    end: torch.Event


@final
class DeviceClock:
    """Measures how long the device takes for the work of lanes. A span lies between two device events. Their times are
    measured from a zero event, for which the host time is known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)
        self._first: _Pending | None = None
        """The oldest span. It is kept outside `_pending`, because an append to the full deque drops the oldest span
        there."""
        self._zero: torch.Event | None = None
        """The completed event from which the times of other events are measured; None before the first measurement.
        `_zero_s`: the value of time.perf_counter() when this event completed."""
        self._zero_s = 0.0

    @contextmanager
    def span(self, recorder: Recorder, lane: str, kind: str, name: str = "", nbytes: int = 0) -> Iterator[None]:
        """Measure the work that the `with` block launches on the current stream. Records nothing if the block raises.
        Called on a lane's thread."""
        start = self._record()
        yield
        end = self._record()
        self._pending.append(
            _Pending(recorder=recorder, lane=lane, kind=kind, name=name, nbytes=nbytes, start=start, end=end)
        )

    def add_spans(self) -> None:
        """Add completed spans to their recorders, in the order of their launch. A later call adds the other spans."""
        if self._first is None and not self._pending:
            return
        if self._zero is None:
            self._zero = self._record()
            self._zero.synchronize()
            self._zero_s = time.perf_counter()
        while self._first is not None or self._pending:
            span = self._first = self._first or self._pending.popleft()
            if not span.end.query():
                return
            self._first = None
            end_s = self._zero_s + self._zero.elapsed_time(span.end) / 1e3
            start_s = end_s - span.start.elapsed_time(span.end) / 1e3
            span.recorder.add(span.lane, span.kind, span.name, start_s, end_s, span.nbytes)
            # A near zero: torch returns milliseconds in fp32, which cannot hold microseconds after some minutes.
            self._zero, self._zero_s = span.end, end_s

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
