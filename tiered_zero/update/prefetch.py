"""State that is read before its update can begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress

from tiered_zero.errors import TieredZeroError
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.update.subgroup_io import SubGroupIO, SubGroupWork


class Prefetcher:
    """Reads the sub-groups that a step will need next, in the order of the step before, into staging buffers that are
    free; all but one, which is left to others.

    [Note: Reading ahead]
    While an update waits for gradients the disk can read the state that those will need. Once a step has begun all of
    its sub-groups, it can read what the next one begins with: during its own last writes, the forward, and the head's
    share of backward, which completes no gradient. What changes state between two steps calls `cancel` first.

    `open_nowait(layout, param_kind)`: a sub-group with its reads under way, None while no buffer is free. One thread at
    a time: the one that steps, and between steps the driver.
    """

    def __init__(self, io: SubGroupIO, open_nowait: Callable[[StateLayout, str], SubGroupWork | None]) -> None:
        self._io = io
        self._open_nowait = open_nowait
        self._param_kind = "param"
        self._works: dict[int, SubGroupWork] = {}
        """Sub-group -> its work, in the order of the reads."""
        self._expected: deque[StateLayout] = deque()
        """What may be read after these."""
        self._order: list[StateLayout] = []
        """The sub-groups of the last step that read any, as it began them."""
        self._begun: set[int] = set()
        self._ended: list[StateLayout] = []
        self._all_begun = False

    @property
    def subgroups(self) -> Collection[int]:
        """Return the indices of those that are read, or being read."""
        return self._works.keys()

    def read(self) -> None:
        """Start to read what is expected next, as far as buffers are free. Leave a read that is refused to the step
        that needs it, which raises the error."""
        with suppress(TieredZeroError):
            while self._io.num_free > 1 and (layout := self._next()) is not None:
                if (work := self._open_nowait(layout, self._param_kind)) is None:
                    return
                self._works[layout.subgroup.index] = work

    def _next(self) -> StateLayout | None:
        while self._expected:
            layout = self._expected.popleft()
            # a delayed update exchanges the homes of the parameters that masters would be made of
            is_fixed = self._param_kind == "param" or not layout.masters.needs_params
            if is_fixed and layout.subgroup.index not in self._begun:
                return layout
        return None

    def evict_last(self) -> bool:
        """Free the buffer of the last one, for one that was not expected. False without any."""
        if not self._works:
            return False
        _, last = self._works.popitem()
        self._expected.appendleft(last.layout)
        self._io.cancel([last])
        return True

    def cancel(self) -> None:
        """Drop what was read: state is about to change, or the order is another than expected."""
        self._expected = deque(self._order)
        for index, work in list(self._works.items()):
            self._io.cancel([work])
            del self._works[index]

    # -- what a step does ----------------------------------------------------------------------------------------------

    def begin_step(self, param_kind: str) -> None:
        if param_kind != self._param_kind:
            self.cancel()
        self._param_kind = param_kind
        self._ended, self._all_begun = [], False

    def take(self, layout: StateLayout) -> SubGroupWork:
        """Begin one of `subgroups`."""
        self._begun.add(layout.subgroup.index)
        return self._works.pop(layout.subgroup.index)

    def note_begun(self, work: SubGroupWork) -> None:
        """Note a sub-group that is begun and was not prefetched."""
        self._begun.add(work.subgroup.index)

    def note_ended(self, work: SubGroupWork) -> None:
        """Note a sub-group that is written. They end in the order in which they were begun."""
        if work.lease is None or not work.reads:
            return
        self._ended.append(work.layout)
        if self._all_begun:
            self._expected.append(work.layout)

    def expect_next_step(self) -> None:
        """Expect the sub-groups of the next step: all of this one are begun, and those still expected do not come."""
        if not self._all_begun:
            self._all_begun = True
            self.cancel()
            self._begun.clear()
            self._expected = deque(self._ended)

    def end_step(self) -> None:
        self.expect_next_step()
        if self._ended:
            self._order = self._ended
        else:  # it was aborted, or had nothing to read
            self._expected = deque(self._order)
        self.read()

    def cancel_all(self) -> None:
        self._begun.clear()
        self.cancel()


class NullPrefetcher(Prefetcher):
    """Reads nothing, for a step over state that rests on the device; frees a buffer of `other` where the step needs
    one."""

    def __init__(self, other: Prefetcher) -> None:
        super().__init__(other._io, other._open_nowait)
        self._other = other

    def read(self) -> None:
        return

    def evict_last(self) -> bool:
        return self._other.evict_last()
