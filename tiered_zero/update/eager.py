"""The job of one update, and optimizer in backward: sub-groups become ready while backward completes gradients."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_zero.concurrency.transfer import Completion, Transfer
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import SubGroup
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.step_gradients import StepGradients
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.update.state_view import GradientSource


class ReadyQueue:
    """Sub-groups in the order in which the next forward needs them, among those that are ready. Any thread.

    Update windows are nested (last gradient out, first forward in), so the shallowest ready one is always the right
    one, once its gradients have arrived: an accelerator's backward is launched ahead of the device. After `close`
    nothing is added; `take_skipped` names sub-groups that this step leaves as they are.
    """

    def __init__(self, ready: Iterable[StateLayout] = (), skipped: Iterable[StateLayout] = ()) -> None:
        self._changed = threading.Condition()
        self._ready = {layout.subgroup.index: layout for layout in ready}
        self._order = sorted(self._ready)
        self._added = list(self._ready)
        """Those that have become ready since the last `take_among`."""
        self._skipped = list(skipped)
        self._closed = False
        self._notified = False

    def add(self, layout: StateLayout) -> None:
        with self._changed:
            self._ready[layout.subgroup.index] = layout
            insort(self._order, layout.subgroup.index)
            self._added.append(layout.subgroup.index)
            self._changed.notify()

    def skip(self, layout: StateLayout) -> None:
        with self._changed:
            self._skipped.append(layout)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def clear(self, keep: Collection[int] = ()) -> list[StateLayout]:
        """Remove what is not taken yet, but for the sub-groups in `keep`. Returns what is removed."""
        with self._changed:
            dropped = [layout for index, layout in self._ready.items() if index not in keep]
            self._ready = {index: layout for index, layout in self._ready.items() if index in keep}
            self._order = sorted(self._ready)
            return dropped

    def peek(self) -> StateLayout | None:
        """Return the shallowest that is ready now."""
        with self._changed:
            return self._ready[self._order[0]] if self._order else None

    def choose(self, gradients: GradientSource) -> StateLayout | None:
        """Return the shallowest that is ready and whose gradients have arrived; where none have, that which became
        ready first, for gradients arrive in this order."""
        with self._changed:
            for index in self._order:
                layout = self._ready[index]
                if all(gradients.has_arrived(segment.unit) for segment in layout.subgroup.segments):
                    return layout
            return next(iter(self._ready.values()), None)

    def take(self, layout: StateLayout) -> None:
        """Remove what `choose` gave; something shallower may have come before it since, or all have been removed."""
        with self._changed:
            if self._ready.pop(index := layout.subgroup.index, None) is not None:
                del self._order[bisect_left(self._order, index)]

    def take_among(self, subgroups: Collection[int]) -> list[StateLayout]:
        """Remove and return those of these sub-groups that have become ready since the last call, in the order given;
        where only a few have, in the order in which they became ready."""
        with self._changed:
            added, self._added = self._added, []
            found = [i for i in added if i in subgroups] if len(added) < len(subgroups) else subgroups
            taken = [self._ready.pop(index) for index in found if index in self._ready]
            if taken:
                self._order = sorted(self._ready)
            return taken

    def take_skipped(self) -> list[StateLayout]:
        with self._changed:
            skipped, self._skipped = self._skipped, []
            return skipped

    def has_ended(self) -> bool:
        """Return whether the queue is closed, and everything that was ready is taken."""
        with self._changed:
            return self._closed and not self._ready

    def notify(self) -> None:
        """End a `wait_change`, the next one if there is none now."""
        with self._changed:
            self._notified = True
            self._changed.notify()

    def wait(self) -> bool:
        """Block until a sub-group is ready (True), or none is left in a closed queue (False)."""
        with self._changed:
            while not (self._ready or self._closed):
                self._changed.wait()
            return bool(self._ready)

    def wait_change(self) -> None:
        """Block until a sub-group is ready, the queue is closed, or `notify` was called since the last time."""
        with self._changed:
            while not (self._ready or self._closed or self._notified):
                self._changed.wait()
            self._notified = False


@dataclass(frozen=True, kw_only=True)
class UpdateJob:
    """One optimizer step, with everything that may change before it is done.

    `groups`: the param groups' values when the step was taken. `after`: compute's mark then: parameters on the device
    are written after what compute had launched. `after_of`: sub-group -> the same, of one that became ready later.
    `param_kind`: which home of a unit takes the new parameters ("param", or "param_back" for a delayed update).
    `unit_updates`: unit index -> what to complete. `every_subgroup`: also those without a gradient, whose parameters
    are written anew. `queue`: sub-groups that become ready one by one; None: all those with a gradient. `on_device`:
    only those whose state rests on the device (True) or does not (False); the others count as written. `computed`: done
    once every update is computed, while the last are still written, or when the job fails.
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
    """Feeds a running job: a sub-group is ready when the gradients of all its units are complete. Driver thread.

    `freeze(unit, into)`: detaches a unit's gradients from the gradient store. `keep(unit)`: every sub-group with a part
    of it is ready, so that they may stay where they are until its update is computed.
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
        """Whether a sub-group holds a part of the unit."""
        return unit.index in self._layouts_of

    def incomplete(self, units: Sequence[Unit]) -> list[Unit]:
        """List the units whose gradients were not complete in backward."""
        return [unit for unit in units if unit.index not in self.job.unit_updates]

    def add(self, unit: Unit, after: Transfer) -> None:
        """Begin the update of the unit: its gradients are complete, and compute does not use it beyond `after`."""
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
        """Add what has a gradient and was not begun, and skip the rest: the step is taken. `after`: compute's mark."""
        self._gradients.fill(gradients)
        for layout in self._layouts:
            if layout.subgroup.index in self._queued:
                continue
            if has_gradient(layout.subgroup, self._gradients):
                self.job.after_of[layout.subgroup.index] = after
                self._queue.add(layout)
            else:
                self._queue.skip(layout)
        self._queue.close()

    def cancel(self) -> bool:
        """End the job without what it has not begun. Returns whether it may have begun anything."""
        self._queue.clear()
        self._queue.close()
        return bool(self._queued)


def has_gradient(subgroup: SubGroup, gradients: GradientSource) -> bool:
    for segment in subgroup.segments:
        for piece in segment.pieces:
            if gradients.has(segment.unit, piece.param):
                return True
    return False
