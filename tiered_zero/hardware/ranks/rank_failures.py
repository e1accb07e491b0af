"""Failures and waits that ranks post for each other in the store of torch.distributed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

from tiered_zero.errors import RankError, TieredZeroError
from tiered_zero.hardware.device.lanes import runs_on_lane

GRACE_S = 3.0
"""A rank whose connection broke waits so long for the message of the rank that broke it."""

_FAILED, _KNOWN, _WAITS = "failed", "known", "wait"
"""Keys of the store: the first failure, and for each rank one where it knows of it and one of where it waits."""

_ALL = "all"
"""In place of a rank before a message that every rank raises as it is."""

_CONNECT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective of this rank. `number`: in the order of those of its group, from 1. `kind`: collectives of other
    kinds do not meet."""

    group: str
    number: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class RankWaits:
    """The waits of one rank's threads. `call`: the collective that its driver waits for, whatever it takes; None: it
    does not. `num_calls`: how many of each group it has made."""

    texts: Sequence[str] = ()
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
        self._own_waits: dict[tuple[bool, int], str] = {}
        """Of this rank's threads, the driver's first: the collective that each waits in."""
        self._call: CollectiveCall | None = None
        """What the driver waits for."""
        self.num_calls: Counter[str] = Counter()
        """Collectives that this rank has made, by group. Driver thread."""
        self._lock = threading.Lock()
        self._is_store_lost = False
        self.found: RankError | None = None
        """What another rank has posted, or what ended a collective here: every call after it raises this."""
        with suppress(Exception):
            self._post_waits(None)

    def post(self, message: str) -> None:
        """Post that this rank has failed, unless another has. Raises nothing."""
        with suppress(Exception):
            if self.found is None and self._reach_store():
                self._store.compare_set(_FAILED, "", f"{self._rank} {message}")
                self._acknowledge()

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

    def post_wait(self, what: str, call: CollectiveCall | None = None) -> None:
        """Post that this thread waits in the collective `what`, for the error of a rank that waits in vain. `call`: the
        driver waits for it, and for nothing else."""
        self._post_waits(what, call)

    def end_wait(self) -> None:
        """Post that this thread no longer waits."""
        self._post_waits(None)

    def _post_waits(self, what: str | None, call: CollectiveCall | None = None) -> None:
        """Every thread posts the waits of all: none hides another's, as that of a lane the driver's."""
        thread = (runs_on_lane(), threading.get_ident())
        with self._lock, suppress(Exception):
            self._own_waits.pop(thread, None)
            if what is not None:
                self._own_waits[thread] = what
            if not runs_on_lane():
                self._call = call
            if not self._is_store_lost:
                texts = [self._own_waits[each] for each in sorted(self._own_waits)]
                posted = RankWaits(texts=texts, call=self._call, num_calls=dict(self.num_calls))
                self._store.set(f"{_WAITS}/{self._rank}", json.dumps(asdict(posted)))

    def wait_known(self, seconds: float) -> None:
        """Wait, so long at most, until all ranks know why this one failed: its end has the launcher end them."""
        deadline_s = time.monotonic() + seconds
        keys = [f"{_KNOWN}/{rank}" for rank in range(self._world_size)]
        with suppress(Exception):
            while self._reach_store() and not self._store.check(keys) and time.monotonic() < deadline_s:
                time.sleep(0.05)

    def _find_cause(self, error: BaseException, what: str) -> RankError:
        if self._reach_store():
            self.post_wait(what)
        deadline = time.monotonic() + GRACE_S
        lost = RankError(
            f"{what}: the connection to another rank was lost, which has posted no error: its process was killed, as "
            "by the kernel for want of memory, or its host is gone. Look at that rank's output and the kernel's log."
        )
        lost.__cause__ = error
        with suppress(Exception):
            while time.monotonic() < deadline and self._reach_store():
                if self._store.check([_FAILED]):
                    return self._read_posted()
                time.sleep(0.05)
            if "imed out" in str(error):
                return self._agree_on(
                    f"Ranks wait for each other: no answer of another rank within {self._timeout_s:g} s "
                    f"(tiered_zero.comm_timeout_s). {self._waits()}. Every rank must make the same calls in the same "
                    "order; a rank that is stopped, or much slower, needs a longer timeout."
                )
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
        self._acknowledge()
        if rank == _ALL:
            return RankError(message)
        return RankError(f"Rank {rank} failed, which ends the run on all {self._world_size} ranks: {message}")

    def _acknowledge(self) -> None:
        """Post that this rank knows of the failure. Idempotent: the driver and the lanes find it each for itself."""
        self._store.set(f"{_KNOWN}/{self._rank}", "")

    def _reach_store(self) -> bool:
        """Return whether the store is there. torch prints a C++ backtrace where it is not, so a failing rank, which
        may be the last, looks before it asks: rank 0 may hold the store, and have ended."""
        base = self._store
        while (inner := getattr(base, "underlying_store", None)) is not None:
            base = inner
        if not self._is_store_lost and hasattr(base, "port"):
            try:
                socket.create_connection((base.host, base.port), timeout=_CONNECT_S).close()
            except OSError:
                self._is_store_lost = True
        return not self._is_store_lost

    def _waits(self) -> str:
        """Name the collectives that each rank waits in now."""
        found = (" and ".join(waits.texts) or "no call that waits" for waits in self._read_waits())
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))

    def _read_waits(self) -> list[RankWaits]:
        """Read what each rank has posted. Raises where the store, or a rank's post, is not there."""
        keys = [f"{_WAITS}/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            raise LookupError("a rank has not begun")
        read = self._store.multi_get if self._store.has_extended_api() else lambda keys: map(self._store.get, keys)
        found = []
        for posted in map(json.loads, read(keys)):
            call = CollectiveCall(**posted["call"]) if posted["call"] else None
            found.append(RankWaits(texts=posted["texts"], call=call, num_calls=posted["num_calls"]))
        return found
