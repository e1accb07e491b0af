"""Which sub-groups may be updated: all at once, or one by one while backward completes their gradients."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable

from tiered_zero.optim.state_layout import StateLayout


class ReadyQueue:
    """Sub-groups in the order in which the next forward needs them, among those that are ready. Any thread.

    Update windows are nested (last gradient out, first forward in), so the shallowest ready one is always the right
    one. After `close` nothing is added; `take_skipped` names sub-groups that this step leaves as they are.
    """

    def __init__(self, ready: Iterable[StateLayout] = (), skipped: Iterable[StateLayout] = ()) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[int, StateLayout]] = [(layout.subgroup.index, layout) for layout in ready]
        heapq.heapify(self._heap)
        self._skipped = list(skipped)
        self._closed = False

    def add(self, layout: StateLayout) -> None:
        with self._changed:
            heapq.heappush(self._heap, (layout.subgroup.index, layout))
            self._changed.notify()

    def skip(self, layout: StateLayout) -> None:
        with self._changed:
            self._skipped.append(layout)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def clear(self) -> None:
        """Give up what is not taken yet."""
        with self._changed:
            self._heap.clear()

    def peek(self) -> StateLayout | None:
        """The shallowest that is ready now."""
        with self._changed:
            return self._heap[0][1] if self._heap else None

    def take(self, layout: StateLayout) -> None:
        """Remove what `peek` gave; something shallower may have come before it since, or all have been given up."""
        with self._changed:
            self._heap = [entry for entry in self._heap if entry[1] is not layout]
            heapq.heapify(self._heap)

    def take_skipped(self) -> list[StateLayout]:
        with self._changed:
            skipped, self._skipped = self._skipped, []
            return skipped

    def wait(self) -> bool:
        """Block until a sub-group is ready (True), or the queue is closed and none is left (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._heap or self._closed)
            return bool(self._heap)
