"""Which sub-groups may be updated: all at once, or one by one while backward completes their gradients."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Collection, Iterable

from tiered_zero.optim.state_layout import StateLayout


class ReadyQueue:
    """Sub-groups in the order in which the next forward needs them, among those that are ready. Any thread.

    Update windows are nested (last gradient out, first forward in), so the shallowest ready one is always the right
    one. After `close` nothing is added; `take_skipped` names sub-groups that this step leaves as they are.
    """

    def __init__(self, ready: Iterable[StateLayout] = (), skipped: Iterable[StateLayout] = ()) -> None:
        self._changed = threading.Condition()
        self._ready = {layout.subgroup.index: layout for layout in ready}
        self._heap = sorted(self._ready)
        """Their indices, and perhaps some that are taken."""
        self._skipped = list(skipped)
        self._closed = False
        self._notified = False

    def add(self, layout: StateLayout) -> None:
        with self._changed:
            self._ready[layout.subgroup.index] = layout
            heapq.heappush(self._heap, layout.subgroup.index)
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
            return dropped

    def peek(self) -> StateLayout | None:
        """The shallowest that is ready now."""
        with self._changed:
            while self._heap and self._heap[0] not in self._ready:
                heapq.heappop(self._heap)
            return self._ready[self._heap[0]] if self._heap else None

    def take(self, layout: StateLayout) -> None:
        """Remove what `peek` gave; something shallower may have come before it since, or all have been removed."""
        with self._changed:
            self._ready.pop(layout.subgroup.index, None)

    def take_among(self, subgroups: Iterable[int]) -> list[StateLayout]:
        """Remove and return those of these sub-groups that are ready, in the order given."""
        with self._changed:
            return [self._ready.pop(index) for index in subgroups if index in self._ready]

    def take_skipped(self) -> list[StateLayout]:
        with self._changed:
            skipped, self._skipped = self._skipped, []
            return skipped

    def has_ended(self) -> bool:
        """Closed, and everything that was ready is taken."""
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
            self._changed.wait_for(lambda: self._ready or self._closed)
            return bool(self._ready)

    def wait_change(self) -> None:
        """Block until a sub-group is ready, the queue is closed, or `notify` was called since the last time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed or self._notified)
            self._notified = False
