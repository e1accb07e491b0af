"""Post this rank's failures and waits in torch.distributed's store, and find failed and blocked ranks there."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

from tiered_zero.errors import RankError, TieredZeroError
from tiered_zero.hardware.device.accelerator import THIS_THREAD, LaneTransfer
from tiered_zero.telemetry.spans import Recorder

GRACE_S = 3.0
"""Seconds that a rank waits for a failed rank's message after a connection broke. The wait also lets the launcher see
which rank ended first."""

POLL_S = 0.5
"""Seconds between two checks of the store for a failed rank's message, during a blocked wait."""

_FAILED, _CLOSED, _WAITS = "failed", "closed", "wait"
"""Keys of the store. The first key holds the first failure. The other two are prefixes of keys for each rank: that the
rank has closed its engine, and what the rank waits for."""

_ALL = "all"
"""The first word of a posted failure that is not the failure of one rank. Every rank raises the text after this word.
The failure of one rank begins with the rank's number instead."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One rank's call of a collective. In a group, the calls with the same `number` on all ranks belong together."""

    group: str  # name of the process group
    number: int  # in the group, from 1
    kind: str  # such as "all_gather"; calls of different kinds cannot complete together


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """What one rank waits for. The rank posts this in the store, and the other ranks read it there."""

    text: str = ""  # the wait in words; "": the rank does not wait
    call: CollectiveCall | None = None  # in which the driver thread is blocked
    num_calls: Mapping[str, int]  # group -> the number of collectives that the rank has made

    def has_made(self, call: CollectiveCall) -> bool:
        """Return whether this blocked rank has made the collective call that belongs together with `call`. `call`: the
        call in which another rank is blocked."""
        if self.call is not None and (self.call.group, self.call.number) == (call.group, call.number):
            return self.call.kind == call.kind  # False: blocked in another kind in its place
        return self.num_calls.get(call.group, 0) >= call.number


def find_blocked(waits: Sequence[RankWaits]) -> set[int]:
    """Return the ranks that wait for each other for ever. Each waits in a collective that another of these ranks has
    not made."""
    # Right even if the posts are of different times: none of these ranks can end its wait first, because it needs a
    # call that another of them makes only after its own wait.
    blocked = {rank for rank, each in enumerate(waits) if each.call is not None}
    while True:
        free = {
            rank
            for rank in blocked
            if (call := waits[rank].call) is not None and all(waits[other].has_made(call) for other in blocked)
        }
        if not free:
            return blocked
        blocked -= free


@dataclass(kw_only=True)
class RankTraffic:
    """Counts the bytes of whole flats and buckets that this rank has passed to collectives."""

    gathered_nbytes: int = 0  # (W - 1)/W of them move between W ranks
    reduced_nbytes: int = 0
    waited_s: float = 0.0  # seconds that the driver was blocked for other ranks


@final
class RankFailures:
    """Posts this rank's failure in a store, and finds the failures of other ranks there. Only the first failure of a
    run is posted. Any thread may use it."""

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout_s: float, traffic: RankTraffic, recorder: Recorder
    ) -> None:
        """Post that this rank has begun. `store`: has only this run's keys. `timeout_s`: the timeout of a collective,
        for error messages. `traffic`, `recorder`: count and record the waits of the driver thread."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._traffic = traffic
        self._recorder = recorder
        self._driver_waits = False
        self.num_calls: Counter[str] = Counter()
        """Group -> the number of collectives that this rank has made. Used on the driver thread."""
        self._is_store_lost = False  # the store may end with the rank that holds it
        self.found: RankError | None = None
        """The failure of another rank, or the error that ended a collective on this rank. Every later collective raises
        this error."""
        with suppress(Exception):
            self.post_wait("", None)

    def post(self, message: str) -> None:
        """Post this rank's failure if no failure was posted before. Raises nothing."""
        with suppress(Exception):
            if self.found is None:
                self._store.compare_set(_FAILED, "", f"{self._rank} {message}")

    def check(self) -> None:
        """Raise RankError if another rank has posted a failure."""
        if self.found is None and not self._is_store_lost:
            try:
                if self._store.check([_FAILED]):
                    self.found = self._read_posted()
            except Exception:
                self._is_store_lost = True
        if self.found is not None:
            raise self.found

    def check_blocked(self) -> None:
        """Raise RankError on every rank if this rank and others wait for each other for ever. Call it on the driver
        thread, after that thread has posted its wait."""
        blocked: set[int] = set()
        with suppress(Exception):
            blocked = find_blocked(self._read_waits())
        if self._rank in blocked:
            self.found = self._agree_on(
                f"Every rank was expected to make the same calls in the same order; found {self._waits()}. None of "
                "them can go on."
            )
            raise self.found

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to raise for the collective `what`, which failed with `error`: another rank's failure, a
        timeout, or a lost connection. An error of this package is returned unchanged."""
        if isinstance(error, TieredZeroError):
            return error
        if self.found is None:
            self.found = self._find_cause(error, what)
        return self.found

    def count_wait(self, what: str, start_s: float, end_s: float) -> None:
        """Count and record a wait of the driver thread for `what`, from `start_s` to `end_s` (time.perf_counter())."""
        self._traffic.waited_s += end_s - start_s
        self._recorder.add("compute", "wait_ranks", what, start_s, end_s)

    def post_wait(self, what: str, call: CollectiveCall | None) -> None:
        """Post that this rank waits for `what`. If `what` is "", post that it waits for nothing. `call`: the collective
        in which the driver waits, or None."""
        if not THIS_THREAD.is_lane:
            self._driver_waits = call is not None
        with suppress(Exception):
            if not self._is_store_lost:
                posted = RankWaits(text=what, call=call, num_calls=dict(self.num_calls))
                self._store.set(f"{_WAITS}/{self._rank}", json.dumps(asdict(posted)))

    def post_closed(self) -> None:
        """Post that this rank closes its groups and has not failed. Raises nothing."""
        with suppress(Exception):
            self._store.set(f"{_CLOSED}/{self._rank}", "")

    def _find_cause(self, error: BaseException, what: str) -> RankError:
        """Return the error that ended the collective `what`. Wait at most GRACE_S for a failed rank's message."""
        if not self._driver_waits:
            self.post_wait(what, None)
        # A failed rank posts its message before it closes its groups. A killed rank posts nothing: wait, so that this
        # rank ends later and the launcher names the killed one.
        deadline_s = time.monotonic() + GRACE_S
        with suppress(Exception):
            if self._store.check([_FAILED]):
                return self._read_posted()
            if "imed out" in str(error):
                return self._agree_on(
                    f"Ranks wait for each other: no answer of another rank within {self._timeout_s:g} s "
                    f"(tiered_zero.comm_timeout_s). {self._waits()}. Every rank must make the same calls in the same "
                    "order; a rank that is stopped, or much slower, needs a longer timeout."
                )
            for rank in range(self._world_size):
                if self._store.check([f"{_CLOSED}/{rank}"]):
                    return self._agree_on(
                        f"Rank {rank} has closed its engine, or ended, while others go on with {what}. Its own output "
                        "says why; every rank makes the same number of steps; drop the last, or pad."
                    )
            while time.monotonic() < deadline_s:
                time.sleep(0.05)
                if self._store.check([_FAILED]):
                    return self._read_posted()
        lost = RankError(
            f"{what}: the connection to another rank was lost, which has posted no error: its process was killed, as "
            "by the kernel for want of memory, or its host is gone. Look at that rank's output and the kernel's log."
        )
        lost.__cause__ = error
        return lost

    def _agree_on(self, message: str) -> RankError:
        """Post `message` for every rank if nothing was posted before. Return the error with the posted message."""
        try:
            self._store.compare_set(_FAILED, "", f"{_ALL} {message}")
            return self._read_posted()
        except Exception:
            return RankError(message)

    def _read_posted(self) -> RankError:
        rank, _, message = self._store.get(_FAILED).decode(errors="replace").partition(" ")
        if rank == _ALL:
            return RankError(message)
        return RankError(f"Rank {rank} failed, which ends the run on all {self._world_size} ranks: {message}")

    def _waits(self) -> str:
        """Describe in which collective each rank waits now."""
        found = enumerate(self._read_waits())
        return "; ".join(f"rank {rank}: {waits.text or 'no call that waits'}" for rank, waits in found)

    def _read_waits(self) -> list[RankWaits]:
        """Read from the store in which call each rank waits. Raises if the store cannot be read, or if a rank has
        posted nothing."""
        keys = [f"{_WAITS}/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            raise LookupError("a rank has not begun")
        read = self._store.multi_get if self._store.has_extended_api() else lambda keys: map(self._store.get, keys)
        found = []
        for posted in map(json.loads, read(keys)):
            call = CollectiveCall(**posted["call"]) if posted["call"] else None
            found.append(RankWaits(text=posted["text"], call=call, num_calls=posted["num_calls"]))
        return found


@final
class CollectiveTransfer(LaneTransfer):
    """The transfer of one collective. A wait for the launch raises RankError if another rank fails first. In host
    memory, a collective is complete once it is launched."""

    def __init__(self, failures: RankFailures, call: CollectiveCall, what: str) -> None:
        super().__init__(launched=threading.Event())
        self._failures = failures
        self._call = call
        self.what = what

    def wait(self) -> None:
        super().wait()
        if self.marker is not None and self._failures.found is not None:
            raise self._failures.found  # the groups were closed, and the result is undefined

    def _await_launch(self) -> None:
        failures, start_s, blocks_driver = self._failures, time.perf_counter(), not THIS_THREAD.is_lane
        if not self._launched.wait(POLL_S):
            if blocks_driver:
                failures.post_wait(self.what, self._call)
            try:
                while not self._launched.wait(POLL_S):
                    failures.check()
                    if blocks_driver:
                        failures.check_blocked()
            finally:
                if blocks_driver and self.failure is None:  # else the post stays, for other ranks to read
                    failures.post_wait("", None)
        if blocks_driver:
            failures.count_wait(self.what, start_s, time.perf_counter())
