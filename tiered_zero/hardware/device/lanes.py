"""Run jobs on worker lanes, for every accelerator. A lane has one thread and one queue; each job has one transfer.

A job is submitted after the jobs for whose transfers it waits, and a lane runs its jobs in order: lanes cannot wait for
each other in a circle through `after`. A job that waits inside its own function must see to this itself.
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
    """State of the calling thread. `is_lane`: whether it belongs to a lane."""

    is_lane = False


THIS_THREAD = _ThisThread()


def runs_on_lane() -> bool:
    """Return whether the calling thread belongs to a lane."""
    return THIS_THREAD.is_lane


def on_lane_error(call: str) -> InternalError:
    """Return the error to raise if `call`, which is about compute's stream, was made on a lane's thread."""
    return InternalError(
        f"{call} was called on {threading.current_thread().name}, whose current stream is not compute's. This is "
        "an error in tiered_zero, not in the model: please report it with this message."
    )


class DeviceMarker(Protocol):
    """The device's side of a transfer, such as a `torch.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Failure:
    """Why a job failed. The transfers of jobs that failed because of it share this object. `collected`: a transfer has
    raised the error."""

    lane: str
    error: BaseException
    traceback: TracebackType | None
    collected: bool = False


_LAUNCHED = threading.Event()
"""The `launched` event of a transfer that is made after its job was launched."""

_LAUNCHED.set()


class LaneTransfer(Transfer):
    """The transfer of a job, which is launched on the host, and complete on the device after that. Without a marker (on
    the CPU) it is complete when it is launched."""

    def __init__(
        self,
        marker: DeviceMarker | None = None,
        failure: Failure | None = None,
        launched: threading.Event = _LAUNCHED,
    ) -> None:
        """Make the transfer of a job. `marker`: the device's event that completes; None: no device. `failure`: why the
        job failed; None: it has not. `launched`: for a queued job, an event that the lane's thread sets after marker
        and failure; the default is set already."""
        self.marker, self.failure = marker, failure
        self._launched = launched

    def finish_launch(self, marker: DeviceMarker | None, failure: Failure | None) -> None:
        """Set marker and failure, then `launched`. Lane's thread only, once."""
        self.marker, self.failure = marker, failure
        self._launched.set()

    def wait_launched(self) -> Failure | None:
        """Block until the job was launched or failed. Return its failure, or None."""
        if not self._launched.is_set():
            self._await_launch()
        return self.failure

    def check_launched(self) -> None:
        """Block until the job was launched. Raise its error if it failed."""
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
    """An item of a lane's queue: `job`, which is launched when all of `after` were launched without an error. `holds`:
    tensors that stay referenced until then."""

    job: Job
    after: Sequence[Transfer]
    holds: Sequence[torch.Tensor]


Launch = Callable[[Work], DeviceMarker | None]
"""Runs a job on the calling thread, after `work.after` on the device, and returns its completion marker. May raise."""


def run_job(work: Work) -> None:
    """Run a job whose work is complete when it returns: the `Launch` of lanes without a stream."""
    work.job()


class DelayInjector:
    """Adds seeded delays at the start and end of jobs, so that a missing wait shows. One thread."""

    def __init__(self, seed: int, lane: str) -> None:
        self._random = random.Random(f"{seed}/{lane}")

    def delay(self) -> None:
        """Sleep for a random time: nothing in 8 of 20 calls, up to 300 us in 11, 1 to 3 ms in 1."""
        draw = self._random.random()
        if draw >= 0.95:
            time.sleep(self._random.uniform(1e-3, 3e-3))
        elif draw >= 0.4:
            time.sleep(self._random.uniform(0.0, 300e-6))


class Lane:
    """An ordered queue of jobs, and the thread that launches them. A failed job does not stop later ones. `inline`:
    while the lane is idle, a job that waits for nothing runs on the submitting thread."""

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
        """Run `job` on this lane's thread and stream, after all earlier jobs and after `after`. Any thread.

        Returns the transfer that is done when the job is complete on the device. `holds`: device tensors that the job
        reads or writes, referenced until it is launched. Free their memory only after `wait_on_compute(transfer)` or
        `transfer.wait()`: the allocator knows only compute's stream. `waits`: False if the job waits for nothing but
        `after`; on the CPU such a job runs at once on the calling thread if no job is ahead of it, since the lane's
        thread would take a core from compute. `transfer`: a new transfer, of the caller's class, to use for the job.
        """
        work = Work(job=job, after=[each for each in after if each is not COMPLETED], holds=tuple(holds))
        with self._lock:  # so that nothing is queued after the end mark
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
        """Finish queued jobs and stop the thread. Log the errors of jobs for which no thread has waited. Idempotent."""
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
            del work, queued  # free what the job holds before its transfer completes
            if failure is not None:
                traceback.clear_frames(failure.traceback)  # and what the frames of a failed job hold
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
