"""Exchange among the ranks of `tiered-zero train` after a step: the loss, whether to stop, each rank's time."""

from __future__ import annotations

import statistics
import struct
import time
from collections import deque
from typing import final

from tiered_zero.engine.engine import Engine
from tiered_zero.telemetry.report import MAX_STEPS_KEPT

_MESSAGE = struct.Struct("<ddq")
"""Loss, own seconds, exit code of a signal or 0."""

RECENT_STEPS = 20


@final
class RankSteps:
    """Exchanges a few numbers after each step, which every rank makes. Main thread.

    A rank's own time is that of a step without what it waited for the others: the slowest rank waits the least.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.world_size = engine.world_size
        self._own_s: list[deque[float]] = [deque(maxlen=MAX_STEPS_KEPT) for _ in range(self.world_size)]
        self._began_s, self._waited_s = time.perf_counter(), self._waited()

    def after_step(self, loss: float, code: int | None) -> tuple[float, int | None]:
        """Exchange this rank's loss and exit code. Return the mean loss, and the code of a signal that any rank has got
        or None: the same on all ranks. Raises RankError."""
        if self.world_size == 1:
            return loss, code
        own_s = time.perf_counter() - self._began_s - (self._waited() - self._waited_s)
        found = [_MESSAGE.unpack(each) for each in self._engine.exchange(_MESSAGE.pack(loss, own_s, code or 0))]
        self._began_s, self._waited_s = time.perf_counter(), self._waited()
        for each, (_, seconds, _) in zip(self._own_s, found, strict=True):
            each.append(seconds)
        codes = [theirs for _, _, theirs in found if theirs]
        return sum(theirs for theirs, _, _ in found) / len(found), codes[0] if codes else None

    @property
    def own_s(self) -> list[float]:
        """The median of each rank's own seconds a step; empty with one rank, and before the first step."""
        return [statistics.median(each) for each in self._own_s if each] if self.world_size > 1 else []

    @property
    def pace(self) -> str:
        """The fastest and the slowest rank in the last steps, for the progress bar."""
        if self.world_size == 1:
            return ""
        recent = [statistics.median(list(each)[-RECENT_STEPS:]) for each in self._own_s if each]
        return f"  ranks {min(recent):.3f} to {max(recent):.3f} s" if recent else ""

    def describe(self) -> str:
        """One line under the tables: who is fast, who is slow, on average; "" with one rank."""
        if not (own_s := self.own_s):
            return ""
        fastest, slowest = min(own_s), max(own_s)
        return (
            f"{self.world_size} ranks; a step without waits for the others: {fastest:.3f} s on rank "
            f"{own_s.index(fastest)}, the fastest, {slowest:.3f} s on rank {own_s.index(slowest)}, the slowest. The "
            "tables are rank 0's."
        )

    def _waited(self) -> float:
        return self._engine.rank_report()["waited_s"] if self._engine.world_size > 1 else 0.0
