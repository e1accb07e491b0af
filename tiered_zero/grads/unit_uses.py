"""Which units forwards use, and how far a backward has come through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch

from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.layout.flat import Unit


@final
class UnitUses:
    """Says when a unit gets no more gradients in a backward, also where some of its parameters get none.

    [Note: Marks of uses]
    Autograd runs what it can in the opposite order of forward. So the gradient of a module's input is complete after
    everything that the module has computed, and a hook on the input finds all gradients of the module's parameters.
    `note` puts one on an input of each call of a module that owns units; a unit is passed once those of all calls since
    the last backward were met. Without such an input (token ids), or where parameters are used outside of their module,
    nothing marks the use; a unit is then passed once all parameters that have had a gradient before have one. What
    comes later all the same waits in the store, and costs memory and time only. Driver thread, or autograd's.
    """

    def __init__(self) -> None:
        self.used: set[int] = set()
        """Units that forwards of this rank have used since the last step()."""
        self._late: set[int] = set()
        """Units that have had a gradient that came too late for their bucket, or that no forward was seen to use."""
        self._marks: Counter[int] = Counter()
        """Unit -> uses whose marks no backward has met."""
        self._unmarked: set[int] = set()
        """Units that were used, since the last backward, where nothing could be marked."""
        self._passed: set[int] = set()
        """Units whose marks the backward that runs has met."""
        self._seen: dict[int, set[int]] = {}
        """Unit -> parameters that have had a gradient."""

    def note(self, units: Iterable[Unit], inputs: Sequence[Any], on_met: Callable[..., None]) -> None:
        """The forward of a module that owns `units` begins, with `inputs`. `on_met`: is called, with the units'
        indices, where a backward meets the mark."""
        indices = [unit.index for unit in units]
        self.used.update(indices)
        # the gradient of a leaf is not in the order of forward
        marked = next((each for each in inputs if isinstance(each, torch.Tensor) and each.grad_fn is not None), None)
        if marked is not None:
            self._marks.update(indices)
            marked.register_hook(partial(on_met, indices))  # type: ignore[no-untyped-call]
        elif torch.is_grad_enabled():
            self._unmarked.update(indices)

    def meet(self, indices: Iterable[int]) -> None:
        """A backward has met a mark of these units."""
        for index in indices:
            self._marks[index] -= 1
            if self._marks[index] <= 0:
                self._passed.add(index)

    def note_late(self, units: Iterable[UnitGradients]) -> None:
        """Remember which of `units` have gradients that no bucket has taken."""
        self._late.update(each.unit.index for each in units if each.waiting)

    def is_expected(self, index: int) -> bool:
        """Whether a backward may bring gradients of the unit."""
        return index in self.used or index in self._late

    def is_complete(self, each: UnitGradients) -> bool:
        """Whether this rank's gradients of the unit have all come in the backward that runs."""
        index = each.unit.index
        if not self.is_expected(index) or len(each.arrived) == len(each.unit.entries):
            return True
        if index not in self._late and index not in self._unmarked and index in self._marks:
            return index in self._passed
        expected = self._seen.get(index)
        return expected is not None and expected <= each.arrived

    def end_backward(self, units: Iterable[UnitGradients]) -> None:
        for each in units:
            if each.arrived:
                self._seen.setdefault(each.unit.index, set()).update(each.arrived)
        self._marks.clear()
        self._unmarked.clear()
        self._passed.clear()

    def end_step(self) -> None:
        self.used.clear()

    def abort(self) -> None:
        """No backward runs any more, and the step is dropped."""
        self.end_backward(())
        self.used.clear()
