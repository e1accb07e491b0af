"""Describe one update, and feed it in backward: a sub-group becomes ready once all its gradients are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_zero.concurrency.transfer import Completion, Transfer
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import SubGroup
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.step_gradients import GradientSource, StepGradients
from tiered_zero.tiers.unit_update import UnitUpdate


class ReadyQueue:
    """A queue of the sub-groups that are ready to be updated, in the order in which the next forward needs them. Any
    thread.

    The shallowest ready sub-group comes first: its gradients are complete last and its forward runs first, so windows
    are nested. One whose gradients have arrived goes ahead of it, because an accelerator's backward is launched ahead
    of the device. After `close` nothing is added. `take_skipped` returns the sub-groups that this step does not update.
    """

    def __init__(self, ready: Iterable[StateLayout] = (), skipped: Iterable[StateLayout] = ()) -> None:
        self._changed = threading.Condition()
        self._ready = {layout.subgroup.index: layout for layout in ready}
        """Sub-group -> its layout, in the order in which they became ready."""
        self._skipped = list(skipped)
        self._closed = False

    def add(self, layout: StateLayout) -> None:
        with self._changed:
            self._ready[layout.subgroup.index] = layout
            self._changed.notify()

    def close(self, skipped: Iterable[StateLayout] = ()) -> None:
        with self._changed:
            self._skipped += skipped
            self._closed = True
            self._changed.notify()

    def clear(self) -> None:
        """Remove all waiting sub-groups."""
        with self._changed:
            self._ready.clear()

    def peek(self) -> StateLayout | None:
        """Return the shallowest ready sub-group; None if there is none."""
        with self._changed:
            return self._ready[min(self._ready)] if self._ready else None

    def choose(self, gradients: GradientSource) -> StateLayout | None:
        """Return the shallowest ready sub-group whose gradients have arrived. If none have arrived, return the one that
        became ready first: gradients arrive in that order."""
        with self._changed:
            for index in sorted(self._ready):
                layout = self._ready[index]
                if all(gradients.has_arrived(segment.unit) for segment in layout.subgroup.segments):
                    return layout
            return next(iter(self._ready.values()), None)

    def take(self, layout: StateLayout) -> None:
        """Remove `layout` if it is still in the queue."""
        with self._changed:
            self._ready.pop(layout.subgroup.index, None)

    def take_among(self, subgroups: Collection[int]) -> list[StateLayout]:
        """Remove and return the ready ones of `subgroups`, in their order."""
        with self._changed:
            if not self._ready:  # `subgroups` are those that the next step begins with
                return []
            return [self._ready.pop(index) for index in list(subgroups) if index in self._ready]

    def take_skipped(self) -> list[StateLayout]:
        with self._changed:
            skipped, self._skipped = self._skipped, []
            return skipped

    def has_ended(self) -> bool:
        """Return whether the queue is closed and empty."""
        with self._changed:
            return self._closed and not self._ready

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a sub-group is ready (True), none is left in a closed queue, or `timeout_s` is over (False)."""
        with self._changed:
            while not (self._ready or self._closed) and self._changed.wait(timeout_s):
                pass
            return bool(self._ready)


@dataclass(frozen=True, kw_only=True)
class UpdateJob:
    """The input of one update.

    `groups`: copies of the param groups' values when the step was taken. `after`: what compute had launched by then; it
    may read parameters on the device, so they are written after it. `after_of`: sub-group -> the same, for a sub-group
    that became ready later. `param_kind`: the slots that take the new parameters: "param", or "param_back" for a
    delayed update. `unit_updates`: unit index -> the `UnitUpdate` to complete. `every_subgroup`: process sub-groups
    without a gradient too, so that their parameters are written to the new slots. `queue`: delivers sub-groups as they
    become ready; None: process all that have a gradient. `on_device`: process only sub-groups whose state rests on the
    device (True) or elsewhere (False), and count the others as written. `computed`: completes when every update is
    computed (the last may still be written) or the job fails.
    """

    gradients: GradientSource
    grad_scale: float
    groups: Sequence[Mapping[str, Any]]
    after: Transfer
    after_of: dict[int, Transfer] = field(default_factory=dict)
    unit_updates: dict[int, UnitUpdate] = field(default_factory=dict)
    param_kind: str = "param"
    every_subgroup: bool = False
    queue: ReadyQueue | None = None
    on_device: bool | None = None
    computed: Completion = field(default_factory=Completion)


class EagerUpdate:
    """Queues a sub-group of a running job as soon as the gradients of all its units are complete. Driver thread.

    `freeze(unit, into)` moves a unit's gradients from the gradient store to the job. `keep(unit)` is called once every
    sub-group of the unit is queued: its gradients may then stay in place until they are used.
    """

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        freeze: Callable[[Unit, StepGradients], None],
        keep: Callable[[Unit], None],
        groups: Sequence[Mapping[str, Any]],
        after: Transfer,
    ) -> None:
        self._layouts = layouts
        self._layouts_of: dict[int, list[StateLayout]] = {}
        """Unit -> the sub-groups that hold a part of it."""
        self._freeze, self._keep = freeze, keep
        self._queue = ReadyQueue()
        self._waits_for = {
            layout.subgroup.index: {segment.unit.index for segment in layout.subgroup.segments} for layout in layouts
        }
        for layout in layouts:
            for index in self._waits_for[layout.subgroup.index]:
                self._layouts_of.setdefault(index, []).append(layout)
        self._queued: set[int] = set()
        self._gradients = StepGradients()
        self.job = UpdateJob(gradients=self._gradients, grad_scale=1.0, groups=groups, after=after, queue=self._queue)

    def updates(self, unit: Unit) -> bool:
        """Return whether a sub-group holds a part of the unit."""
        return unit.index in self._layouts_of

    def incomplete(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units whose gradients were not complete in backward."""
        return [unit for unit in units if unit.index not in self.job.unit_updates]

    def add(self, unit: Unit, after: Transfer) -> None:
        """Begin the unit's update: its gradients are complete, and compute reads its parameters only until `after`."""
        self._freeze(unit, self._gradients)
        for layout in self._layouts_of[unit.index]:
            waits_for = self._waits_for[layout.subgroup.index]
            waits_for.discard(unit.index)
            if not waits_for and layout.subgroup.index not in self._queued:
                self._queued.add(layout.subgroup.index)
                self.job.after_of[layout.subgroup.index] = after
                self._queue.add(layout)
                for segment in layout.subgroup.segments:
                    if all(own.subgroup.index in self._queued for own in self._layouts_of[segment.unit.index]):
                        self._keep(segment.unit)

    def finish(self, gradients: StepGradients, after: Transfer) -> None:
        """Queue the remaining sub-groups that have a gradient, skip the others, and close the queue. `step()` calls
        this. `after`: what compute has launched."""
        self._gradients.fill(gradients)
        skipped: list[StateLayout] = []
        for layout in self._layouts:
            if layout.subgroup.index in self._queued:
                continue
            if has_gradient(layout.subgroup, self._gradients):
                self.job.after_of[layout.subgroup.index] = after
                self._queue.add(layout)
            else:
                skipped.append(layout)
        self._queue.close(skipped)

    def cancel(self) -> bool:
        """End the job without the sub-groups that it has not begun. Return whether it may have begun any."""
        self._queue.clear()
        self._queue.close()
        return bool(self._queued)


def has_gradient(subgroup: SubGroup, gradients: GradientSource) -> bool:
    for segment in subgroup.segments:
        for piece in segment.pieces:
            if gradients.has(segment.unit, piece.param):
                return True
    return False
