"""Uses of units by forwards, and the progress of a backward through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, final
from weakref import WeakSet

import torch

from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.layout.flat import Unit

NO_MARK = 1 << 62
"""Later than any mark."""


@final
class UseMark:
    """A hook on the input of one call of a module. It lives as long as the graph that autograd has recorded of it.

    `number`: in the order of calls. `is_met`: whether a backward has come to it."""

    __torch_unserializable__ = True  # a tensor with the hook may be saved

    def __init__(self, number: int, on_met: Callable[[UseMark], None]) -> None:
        self.number = number
        self.is_met = False
        self._on_met = on_met

    def __call__(self, _grad: torch.Tensor) -> None:
        self._on_met(self)


@final
class UnitUses:
    """Says when a unit gets no more gradients in a backward, also where some of its parameters get none.

    [Note: Marks of uses]
    Autograd runs what it can in the opposite order of forward. So the gradient of a module's input is complete after
    everything that the module has computed, and a hook on the input finds all gradients of the module's parameters.
    `note` puts one on an input of each call of a module that owns units. Once it is met backward is through that call,
    and through all later ones, also those that the loss does not depend on: a unit is passed when no call of it was
    earlier, of those that no backward has met. Without such an input (token ids), or where parameters are used outside
    of their module, nothing marks the use; a unit is then passed once all parameters that have had a gradient before
    have one. What comes later all the same waits in the store, and costs memory and time only. Driver thread, or
    autograd's.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._marks: dict[int, WeakSet[UseMark]] = {}
        """Unit -> its uses in graphs that are still there."""
        self._unmarked: set[int] = set()
        """Units that were used, since the last step(), where nothing could be marked."""
        self._front = NO_MARK
        """The number of the earliest mark that the backward that runs has met."""
        self._seen: dict[int, set[int]] = {}
        """Unit -> parameters that have had a gradient."""

    def note(self, units: Iterable[Unit], inputs: Sequence[Any], on_met: Callable[[UseMark], None]) -> None:
        """The forward of a module that owns `units` begins, with `inputs`. `on_met`: is called with the mark, where a
        backward comes to it."""
        indices = [unit.index for unit in units]
        # the gradient of a leaf is not in the order of forward
        marked = next((each for each in inputs if isinstance(each, torch.Tensor) and each.grad_fn is not None), None)
        if marked is not None:
            mark = UseMark(next(self._numbers), on_met)
            marked.register_hook(mark)  # type: ignore[no-untyped-call]
            for index in indices:
                self._marks.setdefault(index, WeakSet()).add(mark)
        else:
            self._unmarked.update(indices)

    def meet(self, mark: UseMark) -> None:
        """A backward has come to a mark."""
        mark.is_met = True
        self._front = min(self._front, mark.number)

    def is_expected(self, index: int) -> bool:
        """Whether a backward may bring gradients of the unit."""
        return bool(self._marks.get(index)) or index in self._unmarked

    def is_complete(self, each: UnitGradients) -> bool:
        """Whether this rank's gradients of the unit have all come in the backward that runs."""
        index = each.unit.index
        if not self.is_expected(index) or len(each.arrived) == len(each.unit.entries):
            return True
        marks = list(self._marks.get(index, ()))  # of graphs that a collection may end at any time
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
        """No backward runs any more, and the step is dropped."""
        self._front = NO_MARK
        self._marks.clear()
        self.end_step()
