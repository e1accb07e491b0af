"""Decide when a backward has passed a unit (it brings no more gradients of the unit), so that these can be reduced."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, final
from weakref import WeakSet

import torch

from tiered_zero.grads.gradient import UnitGradients
from tiered_zero.layout.flat import Unit

NO_MARK = 1 << 62
"""A number later than any mark."""


@final
class UseMark:
    """A hook on an input of one call of a module. It exists as long as the graph that autograd recorded of the call.

    `number`: its place in the order of calls. `is_met`: whether a backward has reached the hook. `on_met`: called when
    it does."""

    __torch_unserializable__ = True  # users may save a tensor that has the hook

    def __init__(self, number: int, on_met: Callable[[UseMark], None]) -> None:
        self.number = number
        self.is_met = False
        self._on_met = on_met

    def __call__(self, _grad: torch.Tensor) -> None:
        self._on_met(self)


@final
class UnitUses:
    """Tells when a unit gets no more gradients in a backward, even if some of its parameters get none. Used on the
    driver thread or autograd's.

    [Note: Marks of uses] Autograd runs nodes in the reverse order of forward if it can. So the gradient of a module's
    input is complete after all gradients of the module's parameters, and a hook on the input sees them all. `note` puts
    such a hook, a mark, on an input of each call of a module that owns units. When backward meets a mark, it has passed
    that call and all later ones, including those that the loss does not depend on. So a unit is passed when backward
    has met or passed the marks of all its calls. A call without such an input (token ids), or a parameter used outside
    of its module, has no mark; the unit is then passed once all of its parameters that ever had a gradient have one. If
    a gradient comes later all the same, it waits in the gradient store, which only costs memory and time.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._marks: dict[int, WeakSet[UseMark]] = {}
        """Unit index -> the marks of its uses in graphs that still exist."""
        self._unmarked: set[int] = set()
        """Indices of units that were used since the last step() without a mark."""
        self._front = NO_MARK
        """The number of the earliest mark that the running backward has met."""
        self._seen: dict[int, set[int]] = {}
        """Unit index -> indices of its parameters that ever had a gradient."""

    def note(self, units: Iterable[Unit], inputs: Sequence[Any], on_met: Callable[[UseMark], None]) -> None:
        """Record that the forward of a module that owns `units` begins, and put a mark on one of `inputs`. `on_met` is
        called with the mark when a backward reaches it."""
        indices = [unit.index for unit in units]
        # an input that autograd has computed: hooks of leaves do not run in the order of forward
        marked = next((each for each in inputs if isinstance(each, torch.Tensor) and each.grad_fn is not None), None)
        if marked is not None:
            mark = UseMark(next(self._numbers), on_met)
            marked.register_hook(mark)  # type: ignore[no-untyped-call]
            for index in indices:
                self._marks.setdefault(index, WeakSet()).add(mark)
        else:
            self._unmarked.update(indices)

    def meet(self, mark: UseMark) -> None:
        """Record that a backward has reached a mark."""
        mark.is_met = True
        self._front = min(self._front, mark.number)

    def is_expected(self, index: int) -> bool:
        """Return whether a backward may bring gradients of the unit."""
        return bool(self._marks.get(index)) or index in self._unmarked

    def is_complete(self, each: UnitGradients) -> bool:
        """Return whether the running backward brings no more gradients of the unit on this rank."""
        index = each.unit.index
        if not self.is_expected(index) or len(each.arrived) == len(each.unit.entries):
            return True
        marks = list(self._marks.get(index, ()))  # a copy: garbage collection may end graphs at any time
        if marks and index not in self._unmarked:
            last = max(mark.number for mark in marks)
            return last >= self._front and all(mark.is_met or mark.number > self._front for mark in marks)
        expected = self._seen.get(index)
        return expected is not None and expected <= each.arrived

    def end_backward(self, units: Iterable[UnitGradients]) -> None:
        for each in units:
            if each.arrived:
                self._seen.setdefault(each.unit.index, set()).update(each.arrived)
        self._front = NO_MARK

    def end_step(self) -> None:
        self._unmarked.clear()

    def abort(self) -> None:
        """Clear everything. Called when the step is dropped and no backward runs any more."""
        self._front = NO_MARK
        self._marks.clear()
        self.end_step()


@final
class UseOrder:
    """Tells which units a backward has passed, only from the order in which units are used. Used on the driver thread,
    or on autograd's while the driver waits.

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
        """Unit index -> the number of uses in forward that no backward has repeated; has a key for each unit used since
        the last step()."""
        self._awaited: deque[int] = deque()
        """Indices of units that this backward reduces and has not passed, in the order of buckets."""
        self._used: set[int] = set()
        """Indices of units that this backward has used."""

    def note_forward(self, index: int) -> None:
        """Record that a forward, which autograd records or recomputes, begins to use the unit."""
        self._left[index] += 1

    def is_expected(self, index: int) -> bool:
        """Return whether a backward may bring gradients of the unit."""
        return index in self._left

    def begin_backward(self, units: Iterable[int]) -> None:
        """Begin a backward that reduces `units`, in the order of buckets."""
        self._awaited = deque(units)
        self._used.clear()

    def note_backward(self, index: int) -> None:
        """Record that the backward begins to use the unit."""
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
