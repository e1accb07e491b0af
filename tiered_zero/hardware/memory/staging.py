"""Lease staging buffers: a fixed number of equal buffers. If none is free, the caller waits."""

from __future__ import annotations

import logging
import threading
import time
from typing import final

import torch

from tiered_zero.concurrency.transfer import STOPPED_S
from tiered_zero.errors import BudgetError
from tiered_zero.hardware.memory.host_memory import HostArena, typed_view
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.telemetry.spans import Recorder

logger = logging.getLogger("tiered_zero")

_SLICE_S = 1.0
"""Seconds between two looks at the clock during a blocked wait."""


@final
class Lease:
    """Ownership of one staging buffer, until `release()` (any thread, only the first call counts) or the end of a
    `with` block.

    `tensor`: [n] uint8 in host memory; n is the requested size, rounded up to a page. `memory`: the bytes of `tensor`,
    for the I/O engines. After the release both are empty, so that a late use fails.
    """

    def __init__(self, pool: StagingPool, index: int, holder: str, tensor: torch.Tensor, memory: memoryview) -> None:
        self._pool = pool
        self._index = index
        self.holder = holder
        self.since_s = time.monotonic()
        self.tensor = tensor
        self.memory = memory

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` elements as a flat of `dtype`."""
        return typed_view(self.tensor, dtype, numel)

    def release(self) -> None:
        self._pool._release(self, self._index)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@final
class StagingPool:
    """Leases `count` buffers of `buffer_nbytes` each, in one slot of the arena. Any thread."""

    def __init__(
        self,
        arena: HostArena,
        buffer_nbytes: int,
        count: int,
        kind: str,
        recorder: Recorder,
        timeout_s: float = 300.0,
    ) -> None:
        """Take the buffers from the arena. `timeout_s`: the longest wait for a lease; a longer one is a deadlock."""
        self.buffer_nbytes = align_up(buffer_nbytes, PAGE_NBYTES)
        self.count = count
        self.kind = kind
        self._arena = arena
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._slot = arena.take(self.buffer_nbytes * count, kind)
        self._changed = threading.Condition()
        self._leased: dict[int, Lease] = {}
        self._free = list(range(count))[::-1]
        """The free buffers; the one released last is leased first."""
        self._closed = False

    @property
    def memory(self) -> memoryview:
        """All buffers, one after another."""
        return self._slot.memory

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lease_nowait(self, nbytes: int, holder: str = "") -> Lease | None:
        """Lease a buffer if one is free now; else return None. Raises BudgetError if `nbytes` is more than a buffer."""
        with self._changed:
            return self._lease(nbytes, holder)

    def lease(self, nbytes: int, holder: str = "", lane: str = "compute") -> Lease:
        """Lease a buffer, waiting until one is free; the wait is recorded as `wait_lease` on `lane`. `holder`: a name
        for the table of holders. Raises BudgetError if `nbytes` is more than a buffer, or after the timeout."""
        with self._changed:
            if (lease := self._lease(nbytes, holder)) is not None:
                return lease
            with self._recorder.span(lane, "wait_lease", f"{self.kind} {holder}".strip()):
                in_time = self._wait_free()
            if not in_time:
                raise BudgetError(self._describe_deadlock(holder))
            lease = self._lease(nbytes, holder)
            assert lease is not None, "woken with a free buffer under the lock"
            return lease

    def _wait_free(self) -> bool:
        """Wait at most `timeout_s` until a buffer is free or the pool is closed. Return False if neither has happened.
        Time in which the process was stopped does not count. Under the lock."""
        looked_s = time.monotonic()
        until_s = looked_s + self._timeout_s
        while (left_s := until_s - looked_s) > 0:
            if self._changed.wait_for(lambda: self.num_free or self._closed, min(left_s, _SLICE_S)):
                return True
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > STOPPED_S:
                until_s += looked_s - before_s
        return bool(self.num_free or self._closed)

    def holders(self) -> list[tuple[str, float]]:
        """Return the holders of buffers, each with the lease's age in seconds, oldest first."""
        now_s = time.monotonic()
        with self._changed:
            return [(lease.holder, now_s - lease.since_s) for lease in self._leased.values()]

    def reclaim(self) -> None:
        """Release every lease. Callers have aborted the holders, and nothing is in flight."""
        for lease in list(self._leased.values()):
            lease.release()

    def close(self) -> None:
        """Return the buffers to the arena; waiting threads raise. Leases still held are logged: their I/O was not
        drained. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for holder, age_s in self.holders():
            logger.error("a %s buffer was still leased at close, by %s for %.1f s", self.kind, holder, age_s)
        self._slot.release()

    def _lease(self, nbytes: int, holder: str) -> Lease | None:
        """Lease a free buffer; None if there is none. Under the lock. Raises BudgetError."""
        if nbytes > self.buffer_nbytes:
            raise BudgetError(
                f"a lease of {format_nbytes(nbytes)} ({nbytes} bytes) was asked of the {self.kind} buffers; each has "
                f"{format_nbytes(self.buffer_nbytes)} ({self.buffer_nbytes} bytes). This run has left its plan."
            )
        if self._closed:
            raise BudgetError(f"the {self.kind} buffers are closed; {holder or 'a caller'} asked for one")
        if not self._free:
            return None
        index = self._free.pop()
        start = index * self.buffer_nbytes
        end = start + align_up(max(nbytes, 1), PAGE_NBYTES)
        holder = holder or threading.current_thread().name
        lease = Lease(self, index, holder, self._slot.tensor[start:end], self._slot.memory[start:end])
        self._leased[index] = lease
        return lease

    def _release(self, lease: Lease, index: int) -> None:
        with self._changed:
            if self._leased.get(index) is not lease:
                return
            self._changed.notify()  # the woken thread continues once the lock is free
            del self._leased[index]
            self._free.append(index)
            tensor = lease.tensor
            lease.tensor, lease.memory = tensor[:0], lease.memory[:0]
            if not self._closed:
                self._arena.poison(tensor)

    def _describe_deadlock(self, holder: str) -> str:
        table = "".join(f"\n  {age_s:8.1f} s  {name}" for name, age_s in self.holders())
        return (
            f"{holder or threading.current_thread().name} waited {self._timeout_s:g} s for one of {self.count} "
            f"{self.kind} buffers; none was released. Held, oldest first, by:{table}\n"
            "This is a stalled transfer or a deadlock in the schedule; the run can be resumed from its last checkpoint."
        )
