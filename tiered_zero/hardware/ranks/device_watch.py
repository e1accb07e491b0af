"""Finds collectives of the device that hang. The host is not blocked by one, or blocked in a call of torch's."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import RankError
from tiered_zero.hardware.device.lanes import THIS_THREAD
from tiered_zero.hardware.ranks.collective_transfer import POLL_S, DeviceCollective
from tiered_zero.hardware.ranks.rank_failures import RankFailures

logger = logging.getLogger("tiered_zero")


@dataclass(kw_only=True)
class _Watched:
    """A collective that was submitted. `since_s`: when it was first seen with nothing before it; None: not yet."""

    transfer: DeviceCollective
    after: Sequence[Transfer]
    since_s: float | None = None


@final
class DeviceWatch:
    """A thread that ends the device's groups where one of their collectives takes longer than the timeout, or where
    another rank has failed: streams, and the host that waits for them, go on, and the next call raises the error. It is
    logged at once, for a program that calls nothing more."""

    def __init__(self, device: torch.device, failures: RankFailures, timeout_s: float, end: Callable[[], None]) -> None:
        """`end`: frees whatever hangs in the groups."""
        self._device = device
        self._failures = failures
        self._timeout_s = timeout_s
        self._end = end
        self._pending: dict[str, deque[_Watched]] = {}
        """Of each group, in the order of their calls."""
        self._posted = ""
        """What the other ranks are shown that this one waits for."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tiered_zero watch of ranks", daemon=True)
        self._thread.start()

    def add(self, group: str, transfer: DeviceCollective, after: Sequence[Transfer]) -> None:
        """Watch `transfer`, whose time begins as `after` is complete, and what was added to the group before. Driver
        thread."""
        with self._changed:
            self._pending.setdefault(group, deque()).append(_Watched(transfer=transfer, after=after))
            self._changed.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        THIS_THREAD.is_lane = True  # what it posts stands beside the driver's own wait
        torch.accelerator.set_device_index(self._device)
        while self._wait_for_work():
            try:
                self._look()
            except Exception as error:
                if not isinstance(error, RankError):  # of the device: every question to it raises from now on
                    self._failures.post(f"{type(error).__name__}: {error}")
                logger.error(
                    "The collectives of %s were ended, so values that it computes from here on are undefined, and the "
                    "run cannot go on: %s",
                    self._device, error,
                )  # fmt: skip
                self._end()
                return

    def _wait_for_work(self) -> bool:
        """Wait until there is something to look at, and a moment more; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or any(self._pending.values()))
            self._changed.wait_for(lambda: self._is_closed, POLL_S)
            return not self._is_closed

    def _look(self) -> None:
        """Post what this rank waits for. Raises RankError where that is in vain."""
        now_s, waiting = time.monotonic(), []
        for first in [found for pending in tuple(self._pending.values()) if (found := self._first(pending))]:
            if first.since_s is None and all(transfer.done() for transfer in first.after):
                first.since_s = now_s
            elif first.since_s is not None:
                waiting.append(first)
        what = " and ".join(each.transfer.what for each in waiting)
        if what != self._posted:
            self._posted = what
            self._failures.post_wait(what) if what else self._failures.end_wait()
        if not waiting:
            return
        self._failures.check()
        if any(each.since_s is not None and now_s - each.since_s >= self._timeout_s for each in waiting):
            error = self._failures.explain(TimeoutError("timed out"), what)
            raise error if isinstance(error, RankError) else RankError(str(error))

    def _first(self, pending: deque[_Watched]) -> _Watched | None:
        while pending and pending[0].transfer.done():
            pending.popleft()
        return pending[0] if pending else None
