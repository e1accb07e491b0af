"""Copy what a run holds to the records of a tag: slot by slot as it rests, reads of the next under writes of the last.

Bytes that rest in host memory are written from where they are, state on nvme through its own staging buffers. All
others (what rests on the device, buffers) pass through a few scratch buffers of a fixed size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import final

import torch

from tiered_zero.checkpoint.run_state import RunState, copied_places, pack, run_ahead, state_nbytes
from tiered_zero.concurrency.transfer import Transfer, wait_all, wait_quietly
from tiered_zero.layout.flat import PACKED_ALIGNMENT_NBYTES, Unit
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.store.writer import RecordWriter
from tiered_zero.system.resources import map_memory
from tiered_zero.tiers.tier import as_bytes
from tiered_zero.update.state_view import Scalars
from tiered_zero.update.subgroup_io import SubGroupWork

SCRATCH_NBYTES = MIB
"""A whole chunk of a record."""

NUM_SCRATCH = 8


@final
class StateSaver:
    """Writes everything that this rank saves of a run, as of `scalars`, once. One thread.

    `free(sub-group)`: is called once an update may change it; nothing else changes what is saved.
    """

    def __init__(self, state: RunState, scalars: Scalars, writer: RecordWriter, free: Callable[[int], None]) -> None:
        self._state = state
        self._io = state.stepper.io
        self._scalars = scalars
        self._places = copied_places(scalars)
        self._writer = writer
        self._free = free
        memory = memoryview(map_memory(SCRATCH_NBYTES * NUM_SCRATCH))
        starts = range(0, len(memory), SCRATCH_NBYTES)
        self._scratch = [memory[start : start + SCRATCH_NBYTES] for start in starts]
        self._in_flight: deque[tuple[Transfer, memoryview | None]] = deque()
        """With the scratch buffer that is free after it."""

    def save(self, buffers: Mapping[str, torch.Tensor], params: Mapping[int, torch.Tensor], with_frozen: bool) -> None:
        """Return when all is written. `buffers`: by name, on the CPU. `params`: unit index -> copies of units on the
        device; others are read. Raises the first error, once nothing uses the run's memory any more."""
        try:
            layouts = self._state.own_layouts
            run_ahead(self._io, layouts, self._begin, lambda work: self._free(work.subgroup.index))
            for unit in self._state.saved_units(with_frozen):
                self._send_unit(unit, params.get(unit.index))
            self._send_buffers(buffers)
            wait_all([transfer for transfer, _ in self._in_flight])
        except BaseException:
            for transfer, _ in self._in_flight:
                wait_quietly(transfer)
            raise

    # -- masters and state ---------------------------------------------------------------------------------------------

    def _begin(self, layout: StateLayout) -> tuple[SubGroupWork, Callable[[], None]] | None:
        home = self._state.inventory.home(layout.subgroup, "state")
        if (raw := home.tier.view(home.slot)) is not None and not layout.masters.needs_params:
            work: SubGroupWork | None = SubGroupWork(
                subgroup=layout.subgroup,
                layout=layout,
                param_kind="param",
                raw=raw,
                lease=None,
                home=home,
                is_staged=False,
                on_device=home.tier.name == "device",
            )
        else:
            work = self._io.open_nowait(layout, "param", initialized=self._scalars.has_state(layout))
        return None if work is None else (work, partial(self._send_subgroup, work))

    def _send_subgroup(self, work: SubGroupWork) -> None:
        for read in work.reads:
            self._io.wait(read, work)
        parts = [work.raw[: state_nbytes(work.layout, self._scalars)]]
        if work.layout.masters.needs_params:
            self._io.bind_outputs(work)
            parts += [as_bytes(params) for params in work.outs]
        for part in parts:
            work.writes += self._send(self._places.state(work.layout).name, part)

    # -- parameters without a master, and buffers ----------------------------------------------------------------------

    def _send_unit(self, unit: Unit, copied: torch.Tensor | None) -> None:
        """Write what is here of a unit that no update writes."""
        name, home = self._places.unit(unit).name, self._state.inventory.find(unit, "param")
        if home is None:
            self._send(name, as_bytes(self._state.param_flat(unit) if copied is None else copied))
        elif (raw := home.tier.view(home.slot)) is None:
            self._send_copied(name, self._windows(unit))
        else:
            self._in_flight += [(written, None) for written in self._send(name, raw[: home.slot.nbytes])]

    def _windows(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Yield a unit on nvme in pieces, as they were written, so that they are verified."""
        home, staging = self._state.inventory.home(unit, "param"), self._state.param_staging
        assert staging is not None, "a tier without views is planned with staging buffers"
        for start in range(0, home.slot.nbytes, staging.buffer_nbytes):
            nbytes = min(staging.buffer_nbytes, home.slot.nbytes - start)
            with staging.lease(nbytes, home.slot.name, lane="update") as lease:
                home.tier.read(home.slot, lease, start).wait()
                yield lease.tensor[:nbytes]

    def _send_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        def parts() -> Iterator[torch.Tensor]:
            position = 0
            for _, buffer, offset in pack(buffers.items()):
                if offset > position:
                    yield torch.zeros(offset - position, dtype=torch.uint8)
                yield as_bytes(buffer.contiguous())
                position = offset + buffer.nbytes

        self._send_copied("buffers", parts())

    def _send(self, name: str, part: torch.Tensor) -> list[Transfer]:
        """Write bytes from where they are, which the transfers are still to read; or copied, where they cannot be."""
        if part.is_cpu and part.data_ptr() % PAGE_NBYTES == 0 and part.numel() % PAGE_NBYTES == 0:
            return [self._writer.append(name, part.numpy().data)]
        self._send_copied(name, [part])
        return []

    def _send_copied(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """Write bytes from wherever they are, a scratch buffer at a time."""
        buffer, filled = self._free_scratch(), 0
        for part in parts:
            at = 0
            while at < part.numel():
                if filled == SCRATCH_NBYTES:
                    self._send_scratch(name, buffer, filled)
                    buffer, filled = self._free_scratch(), 0
                nbytes = min(part.numel() - at, SCRATCH_NBYTES - filled)
                target = torch.frombuffer(buffer, dtype=torch.uint8)[filled : filled + nbytes]
                target.copy_(part[at : at + nbytes])
                filled, at = filled + nbytes, at + nbytes
        self._send_scratch(name, buffer, filled)

    def _free_scratch(self) -> memoryview:
        while not self._scratch:
            self._in_flight[0][0].wait()
            if (buffer := self._in_flight.popleft()[1]) is not None:
                self._scratch.append(buffer)
        return self._scratch.pop()

    def _send_scratch(self, name: str, buffer: memoryview, filled: int) -> None:
        """Write what is filled of a buffer, with zeros up to a whole page."""
        nbytes = align_up(filled, PAGE_NBYTES)
        buffer[filled:nbytes] = bytes(nbytes - filled)
        if nbytes:
            self._in_flight.append((self._writer.append(name, buffer[:nbytes]), buffer))
        else:
            self._scratch.append(buffer)


def needed_nbytes(state: RunState, buffers: Iterable[torch.Tensor], with_frozen: bool) -> int:
    """Bytes of the records that this rank writes at most."""
    slots = sum(layout.nbytes for layout in state.own_layouts)
    segments = (one for layout in state.own_layouts if layout.masters.needs_params for one in layout.subgroup.segments)
    units = sum(own.nbytes for own in state.saved_units(with_frozen))
    packed = sum(align_up(buffer.nbytes, PACKED_ALIGNMENT_NBYTES) for buffer in buffers)
    return slots + sum(segment.nbytes for segment in segments) + units + align_up(packed, PAGE_NBYTES)
