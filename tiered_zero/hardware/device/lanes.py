"""Worker lanes, shared by every accelerator: one thread, one queue, one transfer a job.

A job is submitted after the jobs whose transfers it waits for, and a lane runs its jobs in order: so lanes cannot wait
for each other in a circle through `after`. What a job waits for in its own body is the job's affair.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.errors import InternalError, PlanError

logger = logging.getLogger("tiered_zero")

Job = Callable[[], None]


class _ThisThread(threading.local):
    """Of the calling thread. `is_lane`: whether it is a lane's."""

    is_lane = False


THIS_THREAD = _ThisThread()


def runs_on_lane() -> bool:
    """Whether the calling thread is a lane's."""
    return THIS_THREAD.is_lane


def on_lane_error(call: str) -> InternalError:
    """The error of a lane's thread that makes `call`, which is about compute's stream."""
    return InternalError(
        f"{call} was called on {threading.current_thread().name}, whose current stream is not compute's. This is "
        "an error in tiered_zero, not in the model: please report it with this message."
    )


class DeviceMarker(Protocol):
    """The device's side of a transfer; `torch.Event` is one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Failure:
    """The cause of a failed job; shared by the transfers of the jobs that failed because of it."""

    lane: str
    error: BaseException
    traceback: TracebackType | None
    collected: bool = False


_LAUNCHED = threading.Event()
"""Of every transfer whose job was launched before it was made."""

_LAUNCHED.set()


class LaneTransfer(Transfer):
    """Launched on the host, then complete on the device. Without a marker the two are one (the CPU)."""

    def __init__(
        self,
        marker: DeviceMarker | None = None,
        failure: Failure | None = None,
        launched: threading.Event = _LAUNCHED,
    ) -> None:
        """`launched`: set by the lane's thread, with marker and failure, where the job is queued."""
        self.marker, self.failure = marker, failure
        self._launched = launched

    def finish_launch(self, marker: DeviceMarker | None, failure: Failure | None) -> None:
        """Lane's thread only, once."""
        self.marker, self.failure = marker, failure
        self._launched.set()

    def wait_launched(self) -> Failure | None:
        """Block until the job was launched or failed."""
        if not self._launched.is_set():
            self._await_launch()
        return self.failure

    def check_launched(self) -> None:
        """Block until the job was launched; raise its error if it failed."""
        if not self._launched.is_set():
            self._await_launch()
        if (failure := self.failure) is not None:
            failure.collected = True
            # the error may be raised several times: each from where it happened, without the earlier raisers' frames
            raise failure.error.with_traceback(failure.traceback)

    def _await_launch(self) -> None:
        self._launched.wait()

    def done(self) -> bool:
        return self._launched.is_set() and (self.marker is None or self.marker.query())

    def wait(self) -> None:
        if not self._launched.is_set() or self.failure is not None:  # in this order: the failure is set first
            self.check_launched()
        if self.marker is not None and not self.marker.query():  # a wait puts the thread to sleep
            self.marker.synchronize()


@dataclass(slots=True, kw_only=True)
class Work:
    """An item of a lane's queue. By the time of its launch, `after` was launched without failing."""

    job: Job
    after: Sequence[Transfer]
    holds: Sequence[torch.Tensor]


Launch = Callable[[Work], DeviceMarker | None]
"""Runs a job on the calling thread, after `work.after` on the device, and marks its completion there. May raise."""


class DelayInjector:
    """Seeded delays at the start and the end of jobs: a missing wait then finds its partner late. One thread."""

    def __init__(self, seed: int, lane: str) -> None:
        self._random = random.Random(f"{seed}/{lane}")

    def delay(self) -> None:
        """Sleep: nothing in 2 of 5 calls, up to 300 us mostly, 1 to 3 ms in 1 of 20."""
        draw = self._random.random()
        if draw >= 0.95:
            time.sleep(self._random.uniform(1e-3, 3e-3))
        elif draw >= 0.4:
            time.sleep(self._random.uniform(0.0, 300e-6))


class Lane:
    """An ordered queue of jobs, and the thread that launches them. A failed job does not stop the jobs behind it.

    `inline`: jobs that wait for nothing run on the thread that submits them, while the lane is idle.
    """

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
        """Run `job` on this lane's thread and stream, after all earlier jobs and after `after`.

        `holds`: device tensors that the job reads or writes, referenced until it is launched. Free their memory only
        after `wait_on_compute(transfer)` or `transfer.wait()`: the allocator knows of no stream but compute.
        `waits`: False of a job that waits for nothing but `after`. Where the device is the CPU and nothing is before
        it, it runs at once on the calling thread: on its own thread it would take a core from compute.
        `transfer`: a new one, of a kind of its own, that stands for the job.
        Returns the transfer that is done when the job is complete on the device. Any thread.
        """
        work = Work(job=job, after=[each for each in after if each is not COMPLETED], holds=tuple(holds))
        with self._lock:  # nothing is queued behind the end mark
            if self._closed:
                raise RuntimeError(f"lane {self.name} is closed; jobs are submitted before the accelerator is closed")
            runs_now = self._inline and not waits and not self._num_queued and transfer is None
            for earlier in work.after:
                runs_now = runs_now and earlier.done()
            if not runs_now:
                self._num_queued += 1
                queued = transfer or LaneTransfer(launched=threading.Event())
                self._queue.put((work, queued))
                return queued
        with self._running:
            return LaneTransfer(*self._perform(work))

    def close(self) -> None:
        """Finish queued jobs and stop the thread; log errors that were not waited for. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()
        for failure in self._failures:
            if not failure.collected:
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
            del work, queued  # what the job holds is free before its transfer says so
            if failure is not None:
                traceback.clear_frames(failure.traceback)  # as are the names in the frames of a job that failed
            transfer.finish_launch(marker, failure)
            del transfer, marker, failure

    def _perform(self, work: Work) -> tuple[DeviceMarker | None, Failure | None]:
        marker: DeviceMarker | None = None
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
            failure = Failure(lane=self.name, error=error, traceback=error.__traceback__)
            self._failures = [old for old in self._failures if not old.collected] + [failure]
        if self._delays is not None:
            self._delays.delay()
        return marker, failure
