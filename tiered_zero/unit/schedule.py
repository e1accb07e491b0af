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

    [Note: Expected uses] A use is expected once its unit was fetched ahead, or is on the device. The expected uses are
    the next ones, in order; a use that is another than the first of them ends them all. So each use of a step is looked
    at once ahead of time and once as it comes, however many units fit on the device.
    """

    def __init__(self) -> None:
        self._next: dict[Pair, Use] = {}
        self._last: Pair = (None, None)
        self._position = 0
        """Elements of all uses so far."""
        self._uses: dict[int, tuple[Pair, int]] = {}
        """Unit -> its last use, and the position after it."""
        self._numel_of: dict[int, int] = {}
        self._distances: dict[Pair, int] = {}
        """Use -> elements of the uses between it and the next use of the same unit, when that came last."""
        self._ahead: deque[Use] = deque()
        """The expected uses."""
        self._tip: Pair = (None, None)
        """The last expected use, or the last use."""
        self.expected: dict[int, int] = {}
        """Unit -> how many of the expected uses are of it; none without any."""
        self._counted: set[int] = set()
        """Expected units that `expected_numel` counts: all but one that was in use as it became expected."""
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
        self._numel_of[unit_index] = numel
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
            if unit_index in self._counted:
                self._counted.discard(unit_index)
                self.expected_numel -= numel
        return True

    def distance(self, unit_index: int) -> int | None:
        """Return how many elements are used before the unit is used again, as it was last time; None: not known."""
        if unit_index not in self._uses:
            return None
        use, position = self._uses[unit_index]
        between = self._distances.get(use)
        return None if between is None else max(0, between - (self._position - position))

    @property
    def last_use(self) -> Use | None:
        return self._last[1]

    # -- ahead -----------------------------------------------------------------------------------------------------

    def expect_next(self, current: int, until: str = "") -> Iterator[int]:
        """Expect the uses that follow the expected ones, and yield each unit that the caller has to provide for first:
        its use is expected when the caller asks for the next one. Unit `current`, which is in use, and units that are
        expected already need nothing. Ends where nothing is known, where the chain closes on itself, and before the
        phase `until`."""
        seen = set()
        while (pair := self._tip) not in seen and len(self._ahead) < len(self._next):
            if (use := self._next.get(pair)) is None or use[0] == until:
                return
            seen.add(pair)
            index = use[1]
            if index not in self.expected and index != current:
                yield index
                self._counted.add(index)
                self.expected_numel += self._numel_of[index]
            self._ahead.append(use)
            self._tip = (pair[1], use)
            self.expected[index] = self.expected.get(index, 0) + 1

    @property
    def next_phase(self) -> str:
        """The phase of the use that `expect_next` asks to provide for."""
        return self._next[self._tip][0]

    def end_expected(self) -> list[int]:
        """Expect nothing: another use came, or a unit is not on the device any more. Returns the units that were
        expected, the farthest first."""
        units = self.expected_units()
        self._ahead.clear()
        self.expected.clear()
        self._counted.clear()
        self._tip = self._last
        self.expected_numel = 0
        return units

    def expected_units(self) -> list[int]:
        """List the units of expected uses, each once, the one that is used last first."""
        return list(dict.fromkeys(map(itemgetter(1), self._ahead)))[::-1]
