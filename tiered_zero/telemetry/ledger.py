"""Keep the ledger of a run: count its bytes by tier and kind, now and at their peak, and check each tier's limit."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

from tiered_zero.errors import BudgetError
from tiered_zero.sizes import format_nbytes


class Ledger:
    """Counts the bytes of a run: each allocation is charged before it is made, and discharged when it is freed. Any
    thread. `limits`: tier -> the most bytes; a tier that is not named has no limit."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        self._lock = threading.Lock()
        self._now: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._peak: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._tier_now: defaultdict[str, int] = defaultdict(int)
        self._tier_peak: defaultdict[str, int] = defaultdict(int)
        self._recent_peak: defaultdict[str, int] = defaultdict(int)

    def charge(self, tier: str, kind: str, nbytes: int) -> None:
        """Count `nbytes` more of `kind` on `tier`. Raises BudgetError, with nothing charged, if the tier's limit would
        be exceeded."""
        with self._lock:
            total = self._tier_now[tier] + nbytes
            limit = self._limits.get(tier)
            if limit is not None and total > limit:
                raise BudgetError(
                    f"{kind} needs {format_nbytes(nbytes)} more on tier {tier}: {format_nbytes(total)} in all, but "
                    f"{format_nbytes(limit)} is allowed (tiered_zero.{tier}_memory_limit). This run has left its plan."
                )
            self._now[tier, kind] += nbytes
            self._tier_now[tier] = total
            self._peak[tier, kind] = max(self._peak[tier, kind], self._now[tier, kind])
            self._tier_peak[tier] = max(self._tier_peak[tier], total)
            self._recent_peak[tier] = max(self._recent_peak[tier], total)

    def discharge(self, tier: str, kind: str, nbytes: int) -> None:
        with self._lock:
            assert self._now[tier, kind] >= nbytes, f"{tier}/{kind}: more bytes released than taken"
            self._now[tier, kind] -= nbytes
            self._tier_now[tier] -= nbytes

    def correct(self, tier: str, kind: str, nbytes: int) -> None:
        """Set the bytes of a kind, after a call failed between an allocation and its charge."""
        with self._lock:
            self._tier_now[tier] += nbytes - self._now[tier, kind]
            self._now[tier, kind] = nbytes

    def now(self, tier: str) -> int:
        return self._tier_now.get(tier, 0)

    def peak(self, tier: str) -> int:
        return self._tier_peak.get(tier, 0)

    def peaks(self) -> dict[str, int]:
        """Return tier -> the most bytes on it so far."""
        with self._lock:
            return dict(sorted(self._tier_peak.items()))

    def take_recent_peaks(self) -> dict[str, int]:
        """Return tier -> the most bytes on it since the last call."""
        with self._lock:
            peaks, self._recent_peak = dict(self._recent_peak), defaultdict(int, self._tier_now)
            return peaks

    def by_kind(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return tier -> kind -> (bytes now, bytes at the kind's own peak)."""
        with self._lock:
            table: dict[str, dict[str, tuple[int, int]]] = {}
            for (tier, kind), nbytes in sorted(self._now.items()):
                table.setdefault(tier, {})[kind] = (nbytes, self._peak[tier, kind])
            return table
