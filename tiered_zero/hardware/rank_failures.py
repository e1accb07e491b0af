"""What ranks post for each other in the store of torch.distributed: a failure, who knows of it, and who waits where."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, final

from tiered_zero.errors import RankError, TieredZeroError
from tiered_zero.hardware.lanes import runs_on_lane

GRACE_S = 3.0
"""A rank whose connection broke waits so long for the message of the rank that broke it."""

_FAILED, _KNOWN = "failed", "known"
"""Keys of the store: the first failure, and one for each rank that knows of it."""


@final
class RankFailures:
    """The first failure of a run, posted by this rank or found by it. Any thread.

    Errors of the store are passed over: it may have ended with its rank.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        """`store`: of this run alone. `timeout_s`: of a collective, for messages."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._own_waits: dict[tuple[bool, int], str] = {}
        """Of this rank's threads, the driver's first: the collective that each waits in."""
        self._lock = threading.Lock()
        self.found: RankError | None = None
        """What another rank has posted, or what ended a collective here: every call after it raises this."""

    def post(self, message: str) -> None:
        """Post that this rank has failed, unless another has. Raises nothing."""
        with suppress(Exception):
            if self.found is None:
                self._store.compare_set(_FAILED, "", f"{self._rank} {message}")
                self._acknowledge()

    def check(self) -> None:
        """Raise RankError where another rank has posted that it failed."""
        if self.found is None:
            with suppress(Exception):
                if self._store.check([_FAILED]):
                    self.found = self._read_posted()
        if self.found is not None:
            raise self.found

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Say what ended a collective: the failure that another rank has posted, the timeout, or a lost connection."""
        if isinstance(error, TieredZeroError):
            return error
        if self.found is None:
            self.found = self._find_cause(error, what)
        return self.found

    def post_wait(self, what: str) -> None:
        """Post that this thread waits in the collective `what`, for the error of a rank that waits in vain."""
        self._post_waits(what)

    def end_wait(self) -> None:
        """Take back that this thread waits."""
        self._post_waits(None)

    def _post_waits(self, what: str | None) -> None:
        """Every thread posts the waits of all: none hides another's, as that of a lane the driver's."""
        thread = (runs_on_lane(), threading.get_ident())
        with self._lock, suppress(Exception):
            self._own_waits.pop(thread, None)
            if what is not None:
                self._own_waits[thread] = what
            self._store.set(f"wait/{self._rank}", "\n".join(self._own_waits[each] for each in sorted(self._own_waits)))

    def wait_known(self, seconds: float) -> None:
        """Wait, so long at most, until all ranks know why this one failed: its end has the launcher end them."""
        deadline_s = time.monotonic() + seconds
        keys = [f"{_KNOWN}/{rank}" for rank in range(self._world_size)]
        with suppress(Exception):
            while not self._store.check(keys) and time.monotonic() < deadline_s:
                time.sleep(0.05)

    def _find_cause(self, error: BaseException, what: str) -> RankError:
        self.post_wait(what)
        deadline = time.monotonic() + GRACE_S
        lost = f"{what}: the connection to another rank was lost ({_first_line(error)}). Its own output says why."
        with suppress(Exception):
            while time.monotonic() < deadline:
                if self._store.check([_FAILED]):
                    return self._read_posted()
                time.sleep(0.05)
            if "imed out" in str(error):
                return RankError(
                    f"rank {self._rank}, {what}: no answer of another rank within {self._timeout_s:g} s "
                    f"(tiered_zero.comm_timeout_s). {self._waits()}. Every rank must make the same calls in the "
                    "same order; a rank that is stopped, or much slower, needs a longer timeout."
                )
        return RankError(lost)

    def _read_posted(self) -> RankError:
        rank, _, message = self._store.get(_FAILED).decode(errors="replace").partition(" ")
        self._acknowledge()
        return RankError(f"Rank {rank} failed, which ends the run on all {self._world_size} ranks: {message}")

    def _acknowledge(self) -> None:
        """Post that this rank knows of the failure. Idempotent: the driver and the lanes find it each for itself."""
        self._store.set(f"{_KNOWN}/{self._rank}", "")

    def others_gather(self) -> bool:
        """Whether another rank has posted that it waits in a gather. Asks the store."""
        with suppress(Exception):
            others = [waits for rank, waits in enumerate(self._read_waits()) if rank != self._rank]
            return any(wait.startswith("all_gather") for waits in others for wait in waits)
        return False

    def _waits(self) -> str:
        """Name the collectives that each rank waits in now."""
        found = (" and ".join(waits) or "no call that waits" for waits in self._read_waits())
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))

    def _read_waits(self) -> list[list[str]]:
        keys = [f"wait/{rank}" for rank in range(self._world_size)]
        texts = [self._store.get(key).decode(errors="replace") if self._store.check([key]) else "" for key in keys]
        return [text.splitlines() for text in texts]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
