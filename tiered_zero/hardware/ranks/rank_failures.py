"""Failures and waits that ranks post for each other in the store of torch.distributed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

from tiered_zero.errors import RankError, TieredZeroError

GRACE_S = 3.0
"""A rank whose connection broke waits so long for another's message, and for the launcher to see which rank ended."""

_FAILED, _CLOSED, _WAITS = "failed", "closed", "wait"
"""Keys of the store: the first failure, and for each rank one where it has closed its engine and one of where it
waits."""

_ALL = "all"
"""In place of a rank before a message that every rank raises as it is."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective of this rank. `number`: in the order of those of its group, from 1. `kind`: collectives of other
    kinds do not meet."""

    group: str
    number: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """The wait of one rank, "" without one. `call`: the collective that its driver waits for, whatever it takes; None:
    it does not. `num_calls`: how many of each group it has made."""

    text: str = ""
    call: CollectiveCall | None = None
    num_calls: Mapping[str, int]

    def has_made(self, call: CollectiveCall) -> bool:
        """Whether this rank has made, or may still make, another rank's `call`. Its driver is blocked."""
        if self.call is not None and (self.call.group, self.call.number) == (call.group, call.number):
            return self.call.kind == call.kind
        return self.num_calls.get(call.group, 0) >= call.number


def find_blocked(waits: Sequence[RankWaits]) -> set[int]:
    """Return the ranks that wait for each other permanently: each is in a collective that another of them has not made,
    and makes none before its own is complete.

    Sound for posts that are of different times: the first of these ranks whose wait ends would need a call that another
    one makes only after its own wait.
    """
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


@final
class RankFailures:
    """The first failure of a run, posted by this rank or found by it. Any thread.

    Errors of the store are passed over: it may have ended with its rank, and is not asked again then.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        """`store`: of this run alone. `timeout_s`: of a collective, for messages."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._driver_waits = False
        self.num_calls: Counter[str] = Counter()
        """Collectives that this rank has made, by group. Driver thread."""
        self._is_store_lost = False
        self.found: RankError | None = None
        """What another rank has posted, or what ended a collective here: every call after it raises this."""
        with suppress(Exception):
            self._post_wait("", None)

    def post(self, message: str) -> None:
        """Post that this rank has failed, unless another has. Raises nothing."""
        with suppress(Exception):
            if self.found is None:
                self._store.compare_set(_FAILED, "", f"{self._rank} {message}")

    def check(self) -> None:
        """Raise RankError where another rank has posted that it failed."""
        if self.found is None and not self._is_store_lost:
            try:
                if self._store.check([_FAILED]):
                    self.found = self._read_posted()
            except Exception:
                self._is_store_lost = True
        if self.found is not None:
            raise self.found

    def check_blocked(self) -> None:
        """Raise RankError, on every rank, where this one and others wait for each other permanently. Driver thread,
        in a wait that has been posted."""
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
        """Say what ended a collective: the failure that another rank has posted, the timeout, or a lost connection."""
        if isinstance(error, TieredZeroError):
            return error
        if self.found is None:
            self.found = self._find_cause(error, what)
        return self.found

    def post_wait(self, what: str, call: CollectiveCall) -> None:
        """Post that the driver waits in the collective `what`, and for nothing else, for the error of a rank that waits
        in vain. Driver thread."""
        self._driver_waits = True
        self._post_wait(what, call)

    def end_wait(self) -> None:
        """Post that the driver no longer waits. Driver thread."""
        self._driver_waits = False
        self._post_wait("", None)

    def _post_wait(self, what: str, call: CollectiveCall | None) -> None:
        with suppress(Exception):
            if not self._is_store_lost:
                posted = RankWaits(text=what, call=call, num_calls=dict(self.num_calls))
                self._store.set(f"{_WAITS}/{self._rank}", json.dumps(asdict(posted)))

    def post_closed(self) -> None:
        """Post that this rank closes its groups and has not failed. Raises nothing."""
        with suppress(Exception):
            self._store.set(f"{_CLOSED}/{self._rank}", "")

    def _find_cause(self, error: BaseException, what: str) -> RankError:
        """A rank posts what it has to say before it closes its groups. One that was killed posts nothing: this one ends
        some seconds later, so that the launcher finds, and names, the one that was killed."""
        if not self._driver_waits:
            self._post_wait(what, None)
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
        """Post `message` for every rank, and return what all raise: this, or what another has posted before."""
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
        """Name the collective that each rank waits in now."""
        found = enumerate(self._read_waits())
        return "; ".join(f"rank {rank}: {waits.text or 'no call that waits'}" for rank, waits in found)

    def _read_waits(self) -> list[RankWaits]:
        """Read what each rank has posted. Raises where the store, or a rank's post, is not there."""
        keys = [f"{_WAITS}/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            raise LookupError("a rank has not begun")
        read = self._store.multi_get if self._store.has_extended_api() else lambda keys: map(self._store.get, keys)
        found = []
        for posted in map(json.loads, read(keys)):
            call = CollectiveCall(**posted["call"]) if posted["call"] else None
            found.append(RankWaits(text=posted["text"], call=call, num_calls=posted["num_calls"]))
        return found
