"""A collective under way, and how the driver waits for the other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from tiered_zero.concurrency.interrupts import INTERRUPTS
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.hardware.device.lanes import runs_on_lane
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

    def wait_at_most(self, seconds: float) -> bool:
        """Block until it is complete, well or badly, or the time is over; return whether it is."""
        return self._event.wait(seconds)

    def wait(self) -> None:
        self._wait(None)

    def wait_unless_gathering(self) -> bool:
        """Wait; return False, before it is complete, where another rank waits in a gather."""
        return self._wait(self._waits.failures.others_gather)

    def _wait(self, gives_up: Callable[[], bool] | None) -> bool:
        """Wait until it is complete, or `gives_up`, asked twice a second; return whether it is."""
        start_s, failures, has_given_up = time.perf_counter(), self._waits.failures, False
        if not self._event.wait(POLL_S):
            blocks_driver = gives_up is None and not runs_on_lane()
            failures.post_wait(self.what, self._call if blocks_driver else None)
            try:
                while not self._event.wait(POLL_S) and not (has_given_up := gives_up is not None and gives_up()):
                    failures.check()
                    INTERRUPTS.check()
                    if blocks_driver:
                        failures.check_blocked()
            finally:
                if self.error is None:
                    failures.end_wait()
        if not runs_on_lane():
            end_s = time.perf_counter()
            self._waits.traffic.waited_s += end_s - start_s
            self._waits.recorder.add("compute", "wait_ranks", self.what, start_s, end_s)
        if self.error is not None:
            raise failures.explain(self.error, self.what)
        return not has_given_up
