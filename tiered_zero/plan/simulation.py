"""Simulate work that runs at the same time: a clock, lanes that do one job at a time, and events.

A process is a generator. It yields a `Job`, an `Event` or a `Room`, and continues when the job is done, the event has
come, or there is room.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, kw_only=True)
class Job:
    """A piece of work for the lane of `resource`."""

    resource: str
    seconds: float
    opposed_s: float | None = None  # the seconds while jobs of another resource wait for the lane; None: `seconds`
    order: int = 0  # of the waiting jobs the one with the lowest number goes first


class Event:
    """An event that processes wait for. It happens once, at the last of `num_awaited` calls of `come`."""

    def __init__(self, num_awaited: int = 1) -> None:
        self._num_awaited = num_awaited
        self.waiting: list[Process] = []

    @property
    def has_come(self) -> bool:
        return self._num_awaited <= 0

    def come(self, clock: Clock) -> None:
        self._num_awaited -= 1
        if self.has_come:
            waiting, self.waiting = self.waiting, []
            for process in waiting:
                clock.resume(process)


class Room:
    """A limited number of places, such as buffers. `yield room` waits for a place and takes it; `leave` frees it."""

    def __init__(self, num_places: int) -> None:
        self.num_free = num_places
        self.waiting: deque[Process] = deque()

    def leave(self, clock: Clock) -> None:
        if self.waiting:
            clock.resume(self.waiting.popleft())
        else:
            self.num_free += 1


Process = Generator[Job | Event | Room, None, None]


class _Lane:
    def __init__(self) -> None:
        self.queue: list[tuple[int, int, Job, Process]] = []
        self.num_queued: Counter[str] = Counter()
        self.is_busy = False


class Clock:
    """Runs processes in simulated time. `lanes`: resource -> the lane that it shares with other resources. A resource
    that is not named has a lane of its own."""

    def __init__(self, lanes: dict[str, str]) -> None:
        self.now_s = 0.0
        self.num_events = 0  # jobs that have ended
        self._names = lanes
        self._lanes: dict[str, _Lane] = {}
        self._ends: list[tuple[float, int, _Lane, Process]] = []
        self._numbers = count()

    def run(self, process: Process, has_ended: Callable[[], bool]) -> None:
        """Start `process`, and continue all waiting processes until `has_ended` returns true or no job is left."""
        self.resume(process)
        while self._ends and not has_ended():
            self.now_s, _, lane, process = heapq.heappop(self._ends)
            self.num_events += 1
            lane.is_busy = False
            self.resume(process)
            self._serve(lane)

    def resume(self, process: Process) -> None:
        """Start or continue a process until it waits."""
        for wish in process:
            if isinstance(wish, Job):
                self._queue(wish, process)
                return
            if isinstance(wish, Room) and wish.num_free:
                wish.num_free -= 1
            elif isinstance(wish, Room) or not wish.has_come:
                wish.waiting.append(process)
                return

    def _queue(self, job: Job, process: Process) -> None:
        lane = self._lanes.setdefault(self._names.get(job.resource, job.resource), _Lane())
        heapq.heappush(lane.queue, (job.order, next(self._numbers), job, process))
        lane.num_queued[job.resource] += 1
        self._serve(lane)

    def _serve(self, lane: _Lane) -> None:
        if lane.is_busy or not lane.queue:
            return
        _, number, job, process = heapq.heappop(lane.queue)
        lane.num_queued[job.resource] -= 1
        seconds = job.seconds
        if job.opposed_s is not None and len(lane.queue) > lane.num_queued[job.resource]:
            seconds = job.opposed_s
        lane.is_busy = True
        heapq.heappush(self._ends, (self.now_s + seconds, number, lane, process))


def all_of(jobs: Sequence[Job]) -> Process:
    yield from jobs
