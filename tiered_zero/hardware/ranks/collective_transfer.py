"""Track a collective under way, and let the driver wait for the other ranks."""

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
"""A blocked wait checks the store this often for the message of a failed rank."""


@dataclass(kw_only=True)
class RankTraffic:
    """Bytes of whole flats and buckets that this rank has passed to collectives; with W ranks another rank has (W -
    1)/W of them. `waited_s`: seconds that the driver was blocked for other ranks."""

    gathered_nbytes: int = 0
    reduced_nbytes: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WaitContext:
    """What a wait for other ranks uses: failures to check, traffic and spans to record it in."""

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
        """Wait for `is_over(seconds)`. Raises RankError if another rank has failed."""
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
    """One collective under way on the host. A wait ends early, with RankError, if another rank has failed."""

    def __init__(self, waits: WaitContext, call: CollectiveCall, what: str) -> None:
        self._waits = waits
        self._call = call
        self.what = what
        self.error: BaseException | None = None
        self._event = threading.Event()

    def end(self, error: BaseException | None) -> None:
        """Complete the transfer. The lane's thread calls it once."""
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
    """One collective on a device. Its event orders what follows. The host waits for its launch, which may wait for the
    other ranks' calls; the wait ends early, with RankError, if another rank has failed."""

    def __init__(self, waits: WaitContext, call: CollectiveCall, what: str) -> None:
        super().__init__(launched=threading.Event())
        self._waits = waits
        self._call = call
        self.what = what

    def wait(self) -> None:
        super().wait()
        if self._waits.failures.found is not None:  # the groups were closed, and the result is undefined
            raise self._waits.failures.found

    def _await_launch(self) -> None:
        self._waits.wait(self._launched.wait, lambda: self.failure is not None, self.what, self._call)
