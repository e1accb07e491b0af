"""An update that is open while backward still completes its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_zero.layout.flat import Unit
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.update.ready import ReadyQueue
from tiered_zero.update.stepper import UpdateJob, has_gradient


@dataclass(frozen=True)
class BackwardStart:
    """What it takes to begin in backward. `seal(unit, into)`: hands a unit's gradients over."""

    layouts: Sequence[StateLayout]
    seal: Callable[[Unit, StepGradients], None]


class OpenUpdate:
    """Feeds a running job: a sub-group is ready when the gradients of all its units are complete. Driver thread."""

    def __init__(self, start: BackwardStart, groups: Sequence[Mapping[str, Any]]) -> None:
        self._start = start
        self._gradients = StepGradients()
        self._queue = ReadyQueue()
        self._waits_for = {
            layout.subgroup.index: {segment.unit.index for segment in layout.subgroup.segments}
            for layout in start.layouts
        }
        self._units = set().union(*self._waits_for.values())
        self._queued: set[int] = set()
        self.job = UpdateJob(self._gradients, 1.0, groups, {}, queue=self._queue)

    def concerns(self, unit: Unit) -> bool:
        return unit.index in self._units

    def missing(self, units: Sequence[Unit]) -> list[Unit]:
        """Units whose gradients were not complete in backward."""
        return [unit for unit in units if unit.index not in self.job.unit_updates]

    def add(self, unit: Unit) -> None:
        """The unit's gradients are complete and nobody computes with it."""
        self._start.seal(unit, self._gradients)
        for layout in self._start.layouts:
            waits_for = self._waits_for[layout.subgroup.index]
            waits_for.discard(unit.index)
            if not waits_for and layout.subgroup.index not in self._queued:
                self._queued.add(layout.subgroup.index)
                self._queue.add(layout)

    def finish(self, gradients: StepGradients) -> None:
        """The step is taken: what has a gradient and was not begun follows, the rest is skipped."""
        self._gradients.fill(gradients)
        for layout in self._start.layouts:
            if layout.subgroup.index in self._queued:
                continue
            if has_gradient(layout.subgroup, self._gradients):
                self._queue.add(layout)
            else:
                self._queue.skip(layout)
        self._queue.close()

    def give_up(self) -> bool:
        """End the job without what it has not begun. Returns whether it may have begun anything."""
        self._queue.clear()
        self._queue.close()
        return bool(self._queued)
