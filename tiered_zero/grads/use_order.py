"""The order in which a forward and its backward use units, which every rank shares at stage 3."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import final


@final
class UseOrder:
    """Says which units a backward has passed, by uses of units alone. Driver thread, or autograd's while it waits.

    [Note: Places of reductions]
    At stage 3 gathers and reductions are collectives of one group, so every rank has to make them in one order. Every
    rank gathers the same units in the same order ([Note: Order of gathers]); which of its gradients come, and when, is
    its own matter, as where ranks choose other experts. So a unit's buckets leave where backward begins to use another
    unit, before that one's gather: its gradients have come by then, or come in the next backward. A unit is passed once
    backward has used it as often as forward did, and uses another one. One that backward does not use, as of a module
    that the loss does not depend on, is passed with the next one behind it in the order of buckets. What is left goes
    as backward ends: the units that forward used first, and those whose uses backward repeats in no such order.
    """

    def __init__(self) -> None:
        self._left: Counter[int] = Counter()
        """Unit -> uses by forwards that no backward has repeated; each unit that was used since the last step()."""
        self._awaited: deque[int] = deque()
        """Units that this backward reduces and has not passed, in the order of buckets."""
        self._used: set[int] = set()
        """Units that it has used."""

    def note_forward(self, index: int) -> None:
        """A forward that autograd records, or computes again, begins to use the unit."""
        self._left[index] += 1

    def is_expected(self, index: int) -> bool:
        """Whether a backward may bring gradients of the unit."""
        return index in self._left

    def begin_backward(self, units: Iterable[int]) -> None:
        """`units`: those that it reduces, in the order of buckets."""
        self._awaited = deque(units)
        self._used.clear()

    def note_backward(self, index: int) -> None:
        """The backward begins to use the unit."""
        if self._left[index]:
            self._left[index] -= 1
        self._used.add(index)
        num_passed = 0
        for number, awaited in enumerate(self._awaited, start=1):
            if awaited not in self._used:
                continue
            if awaited == index or self._left[awaited]:
                break
            num_passed = number
        for _ in range(num_passed):
            self._awaited.popleft()

    def is_awaited(self, index: int) -> bool:
        """Whether the backward has not passed the unit."""
        return index in self._awaited

    def end_step(self) -> None:
        self._left.clear()
