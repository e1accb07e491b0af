"""Predict what will be used next from what was used last time."""

from __future__ import annotations

from collections.abc import Iterator

Use = tuple[str, int]
"""(phase, unit index): "forward" or "backward", and which unit."""


class Schedule:
    """Remembers, for each pair of successive uses, the use that followed. A hint, never a requirement.

    A pair of uses distinguishes the visits of a tied unit (embedding, then head), keeps what it knows through
    evaluation or a branch, and follows a changed order after one pass. Memory: one entry per distinct pair.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[Use | None, Use | None], Use] = {}
        self._last: tuple[Use | None, Use | None] = (None, None)

    def observe(self, phase: str, unit_index: int) -> None:
        use = (phase, unit_index)
        if use == self._last[1]:
            return  # nested or repeated use of the same unit
        self._next[self._last] = use
        self._last = (self._last[1], use)

    def upcoming(self) -> Iterator[Use]:
        """Yield uses in the expected order; end where nothing is known or the chain closes on itself."""
        pair, seen = self._last, set()
        while pair not in seen and (use := self._next.get(pair)) is not None:
            seen.add(pair)
            yield use
            pair = (pair[1], use)
