"""Optimizer in backward: an update that is open while backward still completes its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiered_zero.layout.flat import Unit
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.update.ready import ReadyQueue
from tiered_zero.update.stepper import UpdateJob, has_gradient


class EagerUpdate:
    """Feeds a running job: a sub-group is ready when the gradients of all its units are complete. Driver thread.

    `freeze(unit, into)`: detaches a unit's gradients from the gradient store.
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        freeze: Callable[[Unit, StepGradients], None],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self._layouts = layouts
        self._freeze = freeze
        self._gradients = StepGradients()
        self._queue = ReadyQueue()
        self._waits_for = {
            layout.subgroup.index: {segment.unit.index for segment in layout.subgroup.segments} for layout in layouts
        }
        self._units = set().union(*self._waits_for.values())
        self._queued: set[int] = set()
        self.job = UpdateJob(gradients=self._gradients, grad_scale=1.0, groups=groups, queue=self._queue)

    def updates(self, unit: Unit) -> bool:
        """Whether a sub-group holds a part of the unit."""
        return unit.index in self._units

    def incomplete(self, units: Sequence[Unit]) -> list[Unit]:
        """Units whose gradients were not complete in backward."""
        return [unit for unit in units if unit.index not in self.job.unit_updates]

    def add(self, unit: Unit) -> None:
        """Update the unit: its gradients are complete, and compute does not use it."""
        self._freeze(unit, self._gradients)
        for layout in self._layouts:
            waits_for = self._waits_for[layout.subgroup.index]
            waits_for.discard(unit.index)
            if not waits_for and layout.subgroup.index not in self._queued:
                self._queued.add(layout.subgroup.index)
                self._queue.add(layout)

    def finish(self, gradients: StepGradients) -> None:
        """Add what has a gradient and was not begun, and skip the rest: the step is taken."""
        self._gradients.fill(gradients)
        for layout in self._layouts:
            if layout.subgroup.index in self._queued:
                continue
            if has_gradient(layout.subgroup, self._gradients):
                self._queue.add(layout)
            else:
                self._queue.skip(layout)
        self._queue.close()

    def cancel(self) -> bool:
        """End the job without what it has not begun. Returns whether it may have begun anything."""
        self._queue.clear()
        self._queue.close()
        return bool(self._queued)
