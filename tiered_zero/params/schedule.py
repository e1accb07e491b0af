"""The order in which units are used, learned from the uses so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from typing import final

Use = tuple[str, int]
"""(phase, unit index): "forward" or "backward", and which unit."""

Pair = tuple[Use | None, Use | None]
"""Two successive uses."""


@final
class Schedule:
    """Remembers, for each pair of successive uses, the use that followed. A hint, never a requirement.

    A pair of uses distinguishes the visits of a tied unit (embedding, then head), keeps what it knows through
    evaluation or a branch, and follows a changed order after one pass. Memory: one entry per distinct pair.

    [Note: Expected uses] `expect` notes a use as provided for: its unit was fetched ahead, or is on the device. The
    expected uses are the next ones, in order; a use that is another than the first of them ends them all. So each use
    of a step is looked at once ahead of time and once as it comes, however many units fit on the device.
    """

    def __init__(self) -> None:
        self._next: dict[Pair, Use] = {}
        self._last: Pair = (None, None)
        self._position = 0
        """Elements of all uses so far."""
        self._uses: dict[int, tuple[Pair, int]] = {}
        """Unit -> its last use, and the position after it."""
        self._distances: dict[Pair, int] = {}
        """Use -> elements of the uses between it and the next use of the same unit, when that came last."""
        self._ahead: deque[Use] = deque()
        """The expected uses."""
        self._tip: Pair = (None, None)
        """The last expected use, or the last use."""
        self.expected: dict[int, int] = {}
        """Unit -> how many of the expected uses are of it; none without any."""
        self._numels: dict[int, int] = {}
        """Expected unit -> its part of `expected_numel`."""
        self.expected_numel = 0
        """Elements of the units of expected uses."""

    def observe(self, phase: str, unit_index: int, numel: int) -> bool:
        """Note a use of a unit of `numel` elements. Nested or repeated uses of one unit are one use. Returns whether
        what is expected still is; the caller ends it where not."""
        use = (phase, unit_index)
        if use == self._last[1]:
            return True
        self._next[self._last] = use
        self._last = (self._last[1], use)
        if (earlier := self._uses.get(unit_index)) is not None:
            self._distances[earlier[0]] = self._position - earlier[1]
        self._position += numel
        self._uses[unit_index] = self._last, self._position
        if not self._ahead:
            self._tip = self._last
            return True
        if self._ahead[0] != use:
            return False
        self._ahead.popleft()
        self.expected[unit_index] -= 1
        if not self.expected[unit_index]:
            del self.expected[unit_index]
            self.expected_numel -= self._numels.pop(unit_index)
        return True

    def distance(self, unit_index: int) -> int | None:
        """Return how many elements are used before the unit is used again, as it was last time; None: not known."""
        if unit_index not in self._uses:
            return None
        use, position = self._uses[unit_index]
        between = self._distances.get(use)
        return None if between is None else max(0, between - (self._position - position))

    # -- ahead -----------------------------------------------------------------------------------------------------

    def upcoming(self) -> Iterator[Use]:
        """Yield the uses that follow the expected ones; end where nothing is known or the chain closes on itself."""
        pair, seen = self._tip, set()
        while pair not in seen and len(self._ahead) < len(self._next) and (use := self._next.get(pair)) is not None:
            seen.add(pair)
            yield use
            pair = (pair[1], use)

    def expect(self, use: Use, numel: int) -> None:
        """Provide for `use`, which is what `upcoming` yields first. `numel`: of its unit, as far as that counts."""
        self._ahead.append(use)
        self._tip = (self._tip[1], use)
        self.expected[use[1]] = self.expected.get(use[1], 0) + 1
        if use[1] not in self._numels:
            self._numels[use[1]] = numel
            self.expected_numel += numel

    def end_expected(self) -> list[int]:
        """Expect nothing: another use came, or a unit is not on the device any more. Returns the units that were
        expected, the farthest first."""
        units = self.expected_units()
        self._ahead.clear()
        self.expected.clear()
        self._numels.clear()
        self._tip = self._last
        self.expected_numel = 0
        return units

    def expected_units(self) -> list[int]:
        """List the units of expected uses, each once, the one that is used last first."""
        return list(dict.fromkeys(map(itemgetter(1), self._ahead)))[::-1]
