"""What a run holds, on its way to a tag: sub-group by sub-group, reads of the next under writes of the last.

All of it passes through the writer's buffers, which stay in the processor's cache: where the host copies a disk's
bytes, as for a virtual one, 1.6 GB take 0.38 s so, and 0.50 s from where they rest. A sub-group may be updated again
once it is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch

from tiered_zero.checkpoint.file_writer import FileWriter
from tiered_zero.checkpoint.portable import Range, RunState, StateSnapshot, buffer_key
from tiered_zero.errors import InternalError
from tiered_zero.layout.flat import Unit
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.update.subgroup_io import SubGroupWork

_MOST_NUMEL = 1 << 18
"""Elements that are made, or brought from a device, at once."""

_READ_AHEAD = 4


@final
class StateSaver:
    """Writes everything that this rank saves of a run, as `snapshot` lists it, once. One thread.

    `writer`: every tensor is declared to it. `free(sub-group)`: is called once an update may change it; nothing else
    changes what is saved.
    """

    def __init__(
        self, state: RunState, snapshot: StateSnapshot, writer: FileWriter, free: Callable[[int], None]
    ) -> None:
        self._state = state
        self._snapshot = snapshot
        self._writer = writer
        self._free = free

    def save(self, buffers: Mapping[str, torch.Tensor], params: Mapping[int, torch.Tensor], with_frozen: bool) -> None:
        """Copy all to the writer, which writes it. `buffers`: by name, on the CPU. `params`: unit index -> copies of
        units on the device; others are read. Raises the first error."""
        self._send_subgroups()
        for unit in self._state.own_units:
            self._send_params(unit, params.get(unit.index), with_frozen)
        for name, buffer in buffers.items():
            self._writer.put(buffer_key(name), 0, buffer.contiguous().view(-1))

    # -- masters and state ---------------------------------------------------------------------------------------------

    def _send_subgroups(self) -> None:
        waiting, opened = deque(self._state.own_layouts), deque[SubGroupWork]()
        try:
            while waiting or opened:
                while waiting and len(opened) < _READ_AHEAD and (work := self._open(waiting[0])) is not None:
                    opened.append(work)
                    waiting.popleft()
                if not opened:
                    raise InternalError("A staging buffer was expected to be free for a save; all are in use.")
                self._send_subgroup(opened[0])
                opened.popleft()
        except BaseException:
            self._state.io.cancel(list(opened))
            raise

    def _open(self, layout: StateLayout) -> SubGroupWork | None:
        home = self._state.inventory.home(layout.subgroup, "state")
        if (raw := home.tier.view(home.slot)) is not None and not layout.masters.needs_params:
            return SubGroupWork(subgroup=layout.subgroup, layout=layout, param_kind="param", raw=raw, lease=None)
        has_state = layout.subgroup.index in self._snapshot.initialized
        return self._state.io.open_nowait(layout, "param", initialized=has_state)

    def _send_subgroup(self, work: SubGroupWork) -> None:
        for read in work.reads:
            self._state.io.wait(read, work)
        for array in self._state.slot_arrays(work.layout, work, self._snapshot):
            self._send(array.ranges, array.read)
        if work.lease is not None:
            work.lease.release()
        self._free(work.subgroup.index)

    def _send(self, ranges: Sequence[Range], read: Callable[[int, int], torch.Tensor]) -> None:
        """`read(first, stop)`: elements of what holds the ranges."""
        for own in ranges:
            for start in range(own.start, own.stop, _MOST_NUMEL):
                numel = min(_MOST_NUMEL, own.stop - start)
                first = own.first + start - own.start
                self._writer.put(own.key, start, read(first, first + numel))

    # -- parameters without a master -----------------------------------------------------------------------------------

    def _send_params(self, unit: Unit, copied: torch.Tensor | None, with_frozen: bool) -> None:
        if ranges := self._state.unmastered_ranges(unit, with_frozen):
            for first, values in self._windows(unit, copied, ranges):
                own = _cut(ranges, first, first + values.numel())
                self._send(own, lambda first, stop, values=values: values[first:stop])  # type: ignore[misc]

    def _windows(
        self, unit: Unit, copied: torch.Tensor | None, ranges: Sequence[Range]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, elements) of what holds a unit here: all of it, or of one on nvme the parts with
        `ranges`, as they were written, so that they are verified."""
        home = self._state.inventory.find(unit, "param")
        if home is None:
            yield 0, self._state.param_flat(unit) if copied is None else copied
            return
        if (raw := home.tier.view(home.slot)) is not None:
            yield 0, raw[: home.slot.nbytes].view(unit.dtype)
            return
        staging = self._state.param_staging
        assert staging is not None, "a tier without views is planned with staging buffers"
        window = staging.buffer_nbytes
        for begin in range(0, home.slot.nbytes, window):
            nbytes = min(window, home.slot.nbytes - begin)
            first = begin // unit.itemsize
            if _cut(ranges, first, first + nbytes // unit.itemsize):
                with staging.lease(nbytes, home.slot.name, lane="update") as lease:
                    home.tier.read(home.slot, lease, begin).wait()
                    yield first, lease.tensor.view(unit.dtype)


def _cut(ranges: Sequence[Range], first: int, stop: int) -> list[Range]:
    """The parts of `ranges` in elements [first, stop) of what holds them, counted from `first`."""
    found = []
    for own in ranges:
        low, high = max(own.first, first), min(own.first + own.stop - own.start, stop)
        if low < high:
            start = own.start + low - own.first
            found.append(Range(key=own.key, start=start, stop=start + high - low, first=low - first))
    return found
