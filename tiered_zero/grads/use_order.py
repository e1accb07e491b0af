"""Follow the order in which a forward and its backward use units. At stage 3 all ranks share it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import final


@final
class UseOrder:
    """Tells which units a backward has passed, from uses of units alone. Driver thread, or autograd's while it waits.

    [Note: Places of reductions] At stage 3 gathers and reductions are collectives of one group, so every rank must make
    them in one order. All ranks gather the same units in the same order ([Note: Order of gathers]), but which gradients
    come, and when, depends on the rank, for example on its experts. So a unit's buckets are reduced when backward
    begins to use another unit, before that unit's gather: its gradients have come by then, or wait for the next
    backward. A unit is passed once backward has used it as often as forward did and uses another one. A unit that
    backward does not use, since the loss does not depend on its module, is passed with the next one after it in the
    order of buckets. The rest is reduced when backward ends: the units that forward used first, and those that backward
    uses in another order.
    """

    def __init__(self) -> None:
        self._left: Counter[int] = Counter()
        """Unit -> uses by forwards that no backward has repeated; has a key for each unit used since the last
        step()."""
        self._awaited: deque[int] = deque()
        """Units that this backward reduces and has not passed, in the order of buckets."""
        self._used: set[int] = set()
        """Units that this backward has used."""

    def note_forward(self, index: int) -> None:
        """Note that a forward which autograd records or recomputes begins to use the unit."""
        self._left[index] += 1

    def is_expected(self, index: int) -> bool:
        """Return whether a backward may bring gradients of the unit."""
        return index in self._left

    def begin_backward(self, units: Iterable[int]) -> None:
        """Begin a backward that reduces `units`, in the order of buckets."""
        self._awaited = deque(units)
        self._used.clear()

    def note_backward(self, index: int) -> None:
        """Note that the backward begins to use the unit."""
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
        """Return whether the backward has not passed the unit yet."""
        return index in self._awaited

    def end_step(self) -> None:
        self._left.clear()
