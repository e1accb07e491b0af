"""State that is read before its update can begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress

from tiered_zero.errors import TieredZeroError
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.update.subgroup_io import SubGroupIO, SubGroupWork


class ReadAhead:
    """Expects that a step begins its sub-groups in the order of the step before, and reads those that it expects into
    staging buffers for which nobody else has a use; all but one, which is left to others.

    [Note: Reading ahead]
    While an update waits for gradients the disk can read what those will need. And once a step has begun all of its
    sub-groups, it can read what the next one begins with: beside its own last writes, the forward, and the head's share
    of backward, which completes no gradient. What changes state between two steps calls `forget` first.

    `open_nowait(layout, param_kind)`: a sub-group with its reads under way, None while no buffer is free. One thread at
    a time: the one that steps, and between steps the driver.
    """

    def __init__(self, passage: SubGroupIO, open_nowait: Callable[[StateLayout, str], SubGroupWork | None]) -> None:
        self._passage = passage
        self._open_nowait = open_nowait
        self._param_kind = "param"
        self._works: dict[int, SubGroupWork] = {}
        """Sub-group -> what is read, the soonest first."""
        self._expected: deque[StateLayout] = deque()
        """What may be read after these."""
        self._order: list[StateLayout] = []
        """Of the last step that read any: those, as it began them."""
        self._begun: set[int] = set()
        self._ended: list[StateLayout] = []
        self._all_begun = False

    @property
    def subgroups(self) -> Collection[int]:
        """Indices of those that are read, or on their way."""
        return self._works.keys()

    def read(self) -> None:
        """Start to read what is expected next, as far as buffers are free. A read that is refused is one for the step
        that needs it, which raises why."""
        with suppress(TieredZeroError):
            while self._passage.num_free > 1 and (layout := self._next()) is not None:
                if (work := self._open_nowait(layout, self._param_kind)) is None:
                    return
                self._works[layout.subgroup.index] = work

    def _next(self) -> StateLayout | None:
        while self._expected:
            layout = self._expected.popleft()
            # a step behind the scenes exchanges the home of the parameters that masters would be made of
            is_fixed = self._param_kind == "param" or not layout.masters.needs_params
            if is_fixed and layout.subgroup.index not in self._begun:
                return layout
        return None

    def evict_last(self) -> bool:
        """One that was not expected needs a buffer: the last of those that were gives up its own. False without any."""
        if not self._works:
            return False
        _, last = self._works.popitem()
        self._expected.appendleft(last.layout)
        self._passage.abandon([last])
        return True

    def forget(self) -> None:
        """State is about to change, or nothing comes as expected."""
        self._expected = deque(self._order)
        for index, work in list(self._works.items()):
            self._passage.abandon([work])
            del self._works[index]

    # -- what a step does ----------------------------------------------------------------------------------------------

    def begin_step(self, param_kind: str) -> None:
        if param_kind != self._param_kind:
            self.forget()
        self._param_kind = param_kind
        self._ended, self._all_begun = [], False

    def take(self, layout: StateLayout) -> SubGroupWork:
        """One of `subgroups` is begun."""
        self._begun.add(layout.subgroup.index)
        return self._works.pop(layout.subgroup.index)

    def note_begun(self, work: SubGroupWork) -> None:
        """One that was not read ahead."""
        self._begun.add(work.subgroup.index)

    def note_ended(self, work: SubGroupWork) -> None:
        """It is written. Sub-groups end in the order in which they were begun."""
        if work.lease is None or not work.reads:
            return
        self._ended.append(work.layout)
        if self._all_begun:
            self._expected.append(work.layout)

    def expect_next_step(self) -> None:
        """All sub-groups of the step are begun; what is still to come was expected in vain."""
        if not self._all_begun:
            self._all_begun = True
            self.forget()
            self._begun.clear()
            self._expected = deque(self._ended)

    def end_step(self) -> None:
        self.expect_next_step()
        if self._ended:
            self._order = self._ended
        else:  # it was given up, or had nothing to read
            self._expected = deque(self._order)
        self.read()

    def cancel_all(self) -> None:
        self._begun.clear()
        self.forget()
