"""A collective under way, and how the driver waits for the other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.hardware.device.lanes import LaneTransfer, runs_on_lane
from tiered_zero.hardware.ranks.rank_failures import CollectiveCall, RankFailures
from tiered_zero.telemetry.spans import Recorder

POLL_S = 0.5
"""A blocked wait looks in the store this often for the message of a rank that failed."""


@dataclass(kw_only=True)
class RankTraffic:
    """Bytes of whole flats and buckets that this rank has handed to collectives so far: with W ranks (W - 1)/W of them
    are another rank's. `waited_s`: seconds that the driver was blocked for other ranks."""

    gathered_nbytes: int = 0
    reduced_nbytes: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WaitContext:
    """The records of a wait: failures to look for, traffic and spans to count it in."""

    failures: RankFailures
    traffic: RankTraffic
    recorder: Recorder

    def wait(
        self,
        is_over: Callable[[float], bool],
        has_failed: Callable[[], bool],
        what: str,
        call: CollectiveCall,
    ) -> None:
        """Wait for `is_over(seconds)`. Raises RankError where another rank has failed."""
        start_s, failures = time.perf_counter(), self.failures
        if not is_over(POLL_S):
            blocks_driver = not runs_on_lane()
            if blocks_driver:
                failures.post_wait(what, call)
            try:
                while not is_over(POLL_S):
                    failures.check()
                    if blocks_driver:
                        failures.check_blocked()
            finally:
                if blocks_driver and not has_failed():
                    failures.end_wait()
        if not runs_on_lane():
            end_s = time.perf_counter()
            self.traffic.waited_s += end_s - start_s
            self.recorder.add("compute", "wait_ranks", what, start_s, end_s)


@final
class CollectiveTransfer(Transfer):
    """One collective under way. A wait ends early, with RankError, where another rank has failed."""

    def __init__(self, waits: WaitContext, call: CollectiveCall, what: str) -> None:
        self._waits = waits
        self._call = call
        self.what = what
        self.error: BaseException | None = None
        self._event = threading.Event()

    def end(self, error: BaseException | None) -> None:
        """Complete it. Called once, by the lane's thread."""
        self.error = error
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._waits.wait(self._event.wait, lambda: self.error is not None, self.what, self._call)
        if self.error is not None:
            raise self._waits.failures.explain(self.error, self.what)


@final
class DeviceCollective(LaneTransfer):
    """One collective of a device. What comes after it is ordered by its event; the host waits for its launch, which may
    have to wait for the other ranks' calls. A wait ends early, with RankError, where another rank has failed."""

    def __init__(self, waits: WaitContext, call: CollectiveCall, what: str) -> None:
        super().__init__(launched=threading.Event())
        self._waits = waits
        self._call = call
        self.what = what

    def wait(self) -> None:
        super().wait()
        if self._waits.failures.found is not None:  # its groups were ended, and its memory has any content
            raise self._waits.failures.found

    def _await_launch(self) -> None:
        self._waits.wait(self._launched.wait, lambda: self.failure is not None, self.what, self._call)
