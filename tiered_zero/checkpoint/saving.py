"""What a run holds, on its way to a tag: sub-group by sub-group, reads of the next under writes of the last.

Bytes that rest in host memory in the portable form are written from where they are. All others (joined masters, what
rests on the device, buffers) pass through a few scratch buffers of a fixed size; state on nvme through its own staging
buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import final

import torch

from tiered_zero.checkpoint.portable import Range, RunState, SlotArray, StateSnapshot, buffer_key
from tiered_zero.errors import InternalError
from tiered_zero.layout.flat import Unit
from tiered_zero.mappings import map_memory
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.tiers.tier import BufferView, as_bytes
from tiered_zero.transfer import Transfer
from tiered_zero.update.subgroup_io import SubGroupWork

Ranges = Sequence[tuple[Range, int]]
"""Each with its first byte in an extent."""

Append = Callable[[memoryview, Ranges], Transfer]
"""Writes an extent: whole pages of memory, which are the writer's until the transfer is done."""

SCRATCH_NBYTES = MIB
NUM_SCRATCH = 8
_MOST_WRITES = 32
"""That are in flight at once. Sub-groups in host memory need no buffer, which would bound them."""

_READ_AHEAD = 4


@final
class WriteQueue:
    """Writes extents, and releases memory once it is written. One thread."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self._in_flight: deque[tuple[Transfer, Callable[[], None] | None]] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._in_flight

    def send(self, memory: memoryview, ranges: Ranges, release: Callable[[], None] | None = None) -> None:
        """Write whole pages. `release`: called once these bytes, and all that were sent before, are written."""
        while len(self._in_flight) >= _MOST_WRITES:
            self.wait_oldest()
        self._in_flight.append((self._append(memory, ranges), release))

    def collect(self) -> None:
        """Release what is written, without waiting."""
        while self._in_flight and self._in_flight[0][0].done():
            self.wait_oldest()

    def wait_oldest(self) -> None:
        transfer, release = self._in_flight[0]
        transfer.wait()
        self._in_flight.popleft()
        if release is not None:
            release()

    def wait_all(self) -> None:
        while self._in_flight:
            self.wait_oldest()

    def abort(self) -> None:
        """Wait until nothing uses the memory any more, whatever became of it, and release it."""
        while self._in_flight:
            transfer, release = self._in_flight.popleft()
            with suppress(Exception):
                transfer.wait()
            if release is not None:
                release()


@final
class _Scratch:
    """Page-aligned buffers of one size, in turns."""

    def __init__(self, writes: WriteQueue) -> None:
        mapping = map_memory(SCRATCH_NBYTES * NUM_SCRATCH)
        memory, tensor = memoryview(mapping), torch.frombuffer(mapping, dtype=torch.uint8)
        starts = range(0, SCRATCH_NBYTES * NUM_SCRATCH, SCRATCH_NBYTES)
        self._free = [
            BufferView(tensor[start : start + SCRATCH_NBYTES], memory[start : start + SCRATCH_NBYTES])
            for start in starts
        ]
        self._writes = writes

    def send(self, values: torch.Tensor, ranges: Ranges) -> None:
        """Copy `values`, at most a buffer of them, from wherever they are, and write them."""
        while not self._free:
            self._writes.wait_oldest()
        buffer = self._free.pop()
        raw = as_bytes(values)
        nbytes = align_up(raw.numel(), PAGE_NBYTES)
        buffer.tensor[: raw.numel()].copy_(raw)
        buffer.tensor[raw.numel() : nbytes].zero_()
        self._writes.send(buffer.memory[:nbytes], ranges, lambda: self._free.append(buffer))


@final
class StateSaver:
    """Writes everything that this rank saves of a run, as `snapshot` lists it, once. One thread.

    `free(sub-group)`: is called once an update may change it; nothing else changes what is saved.
    """

    def __init__(self, state: RunState, snapshot: StateSnapshot, append: Append, free: Callable[[int], None]) -> None:
        self._state = state
        self._snapshot = snapshot
        self._free = free
        self._writes = WriteQueue(append)
        self._scratch = _Scratch(self._writes)

    def save(self, buffers: Mapping[str, torch.Tensor], params: Mapping[int, torch.Tensor], with_frozen: bool) -> None:
        """Return when all is written. `buffers`: by name, on the CPU. `params`: unit index -> copies of units on the
        device; others are read. Raises the first error, once nothing uses the run's memory any more."""
        try:
            self._send_subgroups()
            for unit in self._state.own_units:
                self._send_params(unit, params.get(unit.index), with_frozen)
            for name, buffer in buffers.items():
                self._send_buffer(buffer_key(name), buffer)
            self._writes.wait_all()
        except BaseException:
            self._writes.abort()
            raise

    # -- masters and state ---------------------------------------------------------------------------------------------

    def _send_subgroups(self) -> None:
        waiting, opened = deque(self._state.own_layouts), deque[SubGroupWork]()
        try:
            while waiting or opened:
                self._writes.collect()
                while waiting and len(opened) < _READ_AHEAD and (work := self._open(waiting[0])) is not None:
                    opened.append(work)
                    waiting.popleft()
                if opened:
                    self._send_subgroup(opened[0])
                    opened.popleft()
                elif not self._writes.is_empty:
                    self._writes.wait_oldest()
                else:
                    raise InternalError("A staging buffer was expected to be free for a save; all are in use.")
        except BaseException:
            self._writes.abort()
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
        arrays = self._state.slot_arrays(work.layout, work, self._snapshot)
        for array in arrays:
            if array.offset is None:
                self._send_copied(array)
        extents = list(_extents([array for array in arrays if array.offset is not None]))
        memory = work.lease.memory if work.lease is not None and not _is_in_place(work) else _memory_of(work.raw)
        for number, (start, stop, ranges) in enumerate(extents):
            is_last = number == len(extents) - 1
            self._writes.send(memory[start:stop], ranges, partial(self._release, work) if is_last else None)
        if not extents:
            self._release(work)

    def _release(self, work: SubGroupWork) -> None:
        if work.lease is not None:
            work.lease.release()
        self._free(work.subgroup.index)

    def _send_copied(self, array: SlotArray) -> None:
        itemsize = array.dtype.itemsize
        step = SCRATCH_NBYTES // itemsize
        for first in range(0, array.numel, step):
            stop = min(first + step, array.numel)
            if own := [(part, part.first * itemsize) for part in _cut(array.ranges, first, stop)]:
                self._scratch.send(array.read(first, stop), own)

    # -- parameters without a master, and buffers ----------------------------------------------------------------------

    def _send_params(self, unit: Unit, copied: torch.Tensor | None, with_frozen: bool) -> None:
        """Write the pages of a unit in which such parameters lie."""
        ranges = self._state.unmastered_ranges(unit, with_frozen)
        home = self._state.inventory.find(unit, "param")
        raw = home.tier.view(home.slot) if home is not None else None
        if home is None:
            raw = as_bytes(self._state.param_flat(unit) if copied is None else copied)
        itemsize = unit.itemsize
        for start, stop in _page_spans(ranges, itemsize):
            # an update that follows writes to the pages of a trainable unit
            is_aligned = raw is not None and raw.is_cpu and raw.data_ptr() % PAGE_NBYTES == 0
            if raw is not None and is_aligned and home is not None and not unit.trainable:
                own = _cut(ranges, start // itemsize, stop // itemsize)
                self._writes.send(_memory_of(raw)[start:stop], [(part, part.first * itemsize) for part in own])
                continue
            for first, last, values in self._windows(unit, raw, start, stop):
                own = _cut(ranges, first // itemsize, last // itemsize)
                self._scratch.send(values, [(part, part.first * itemsize) for part in own])

    def _windows(
        self, unit: Unit, raw: torch.Tensor | None, start: int, stop: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (first byte, last + 1, the bytes) of pieces of a unit: of one on nvme as they were written, so that
        they are verified."""
        if raw is not None:
            for first in range(start, stop, SCRATCH_NBYTES):
                last = min(first + SCRATCH_NBYTES, stop)
                yield first, last, raw[first:last]
            return
        home, staging = self._state.inventory.home(unit, "param"), self._state.param_staging
        assert staging is not None, "a tier without views is planned with staging buffers"
        window = staging.buffer_nbytes
        for begin in range(start - start % window, stop, window):
            with staging.lease(min(window, home.slot.nbytes - begin), home.slot.name, lane="update") as lease:
                home.tier.read(home.slot, lease, begin).wait()
                for first in range(max(begin, start), min(begin + lease.tensor.numel(), stop), SCRATCH_NBYTES):
                    last = min(first + SCRATCH_NBYTES, begin + lease.tensor.numel(), stop)
                    yield first, last, lease.tensor[first - begin : last - begin]

    def _send_buffer(self, key: str, buffer: torch.Tensor) -> None:
        flat = buffer.contiguous().view(-1)
        step = SCRATCH_NBYTES // buffer.dtype.itemsize
        for first in range(0, flat.numel(), step):
            stop = min(first + step, flat.numel())
            self._scratch.send(flat[first:stop], [(Range(key=key, start=first, stop=stop, first=0), 0)])


def _extents(arrays: Sequence[SlotArray]) -> Iterator[tuple[int, int, list[tuple[Range, int]]]]:
    """Merge arrays that lie one behind the other in a slot: (first byte, last + 1, ranges with their bytes in it)."""
    start = stop = 0
    ranges: list[tuple[Range, int]] = []
    for array in arrays:
        assert array.offset is not None, "an array that rests in the portable form"
        if ranges and array.offset != stop:
            yield start, stop, ranges
            ranges = []
        if not ranges:
            start = array.offset
        stop = array.offset + align_up(array.numel * array.dtype.itemsize, PAGE_NBYTES)
        base = array.offset - start
        ranges = [*ranges, *((part, base + part.first * array.dtype.itemsize) for part in array.ranges)]
    if ranges:
        yield start, stop, ranges


def _cut(ranges: Sequence[Range], first: int, stop: int) -> list[Range]:
    """The parts of `ranges` in elements [first, stop) of what holds them, counted from `first`."""
    found = []
    for own in ranges:
        low, high = max(own.first, first), min(own.first + own.stop - own.start, stop)
        if low < high:
            start = own.start + low - own.first
            found.append(Range(key=own.key, start=start, stop=start + high - low, first=low - first))
    return found


def _page_spans(ranges: Sequence[Range], itemsize: int) -> list[tuple[int, int]]:
    """The whole pages that hold `ranges`, which are in order: (first byte, last + 1)."""
    spans: list[tuple[int, int]] = []
    for own in ranges:
        start = own.first * itemsize // PAGE_NBYTES * PAGE_NBYTES
        stop = align_up((own.first + own.stop - own.start) * itemsize, PAGE_NBYTES)
        first, last = spans.pop() if spans and start <= spans[-1][1] else (start, stop)
        spans.append((first, max(last, stop)))
    return spans


def _is_in_place(work: SubGroupWork) -> bool:
    """Whether the state is used where it rests; the lease, if there is one, is for parameters then."""
    return work.lease is None or work.raw.data_ptr() != work.lease.tensor.data_ptr()


def _memory_of(raw: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor in host memory."""
    return raw.numpy().data if raw.is_cpu else memoryview(b"")
