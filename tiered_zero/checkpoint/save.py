"""Save one rank's part of a run to a tag (one saved checkpoint): capture it, write it, publish the tag. `AsyncSave`
writes and publishes during training."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from tiered_zero.checkpoint.driver import join_states, own_state, to_json
from tiered_zero.checkpoint.index import (
    RunState,
    Share,
    copied_places,
    list_tensors,
    pack,
    run_ahead,
    state_nbytes,
)
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.concurrency.transfer import COMPLETED, Completion, Transfer, wait_all, wait_quietly
from tiered_zero.config.schema import Config
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import PACKED_ALIGNMENT_NBYTES, Unit
from tiered_zero.record.data_files import RecordWriter
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.system import map_memory
from tiered_zero.tiers.tier import as_bytes
from tiered_zero.update.policy import UpdatePolicy
from tiered_zero.update.state_view import Scalars
from tiered_zero.update.subgroup_io import SubGroupWork
from tiered_zero.version import __version__

logger = logging.getLogger("tiered_zero")

_MOST_COPIED_NBYTES = 64 * MIB
"""Limit in bytes for the units on the device that an asynchronous save copies. Above it, the save copies no unit, and
returns only when everything is written."""


def written_by(rule: UpdateRule, config: Config, runtime: Runtime) -> dict[str, Any]:
    """Return the fields of `WrittenBy` for this run, except the time."""
    return {
        "tiered_zero": __version__,
        "torch": str(torch.__version__),
        "kernel": rule.kernel.level if rule.kernel is not None else "torch",
        "rule": rule.name,
        "state_format": config.tiered_zero.state_format,
        "world_size": runtime.collectives.world_size,
        "num_threads": torch.get_num_threads() if runtime.accelerator.shares_cores else 0,
    }


@final
@dataclass(frozen=True, kw_only=True)
class Capture:
    """Copies of what a script may change during a save. Made on the driver thread; `write` may run on any thread.

    `fields`: fields of the manifest. `needed_nbytes`: the most bytes that this rank will write. `buffers`: CPU copies
    of buffers, by name. `params`: unit index -> a CPU copy of a unit that lives on the device. `may_return`: whether an
    asynchronous save may return before everything is written."""

    fields: Mapping[str, Any]
    needed_nbytes: int
    buffers: Mapping[str, torch.Tensor]
    params: Mapping[int, torch.Tensor]
    may_return: bool
    with_frozen: bool
    save_latest: bool

    @classmethod
    def take(cls, state: RunState, fields: Mapping[str, Any], *, with_frozen: bool, save_latest: bool) -> Capture:
        """Copy to host memory what a script may change during the save: buffers, and the saved units on the device.
        Copy these units only if all of them fit in `_MOST_COPIED_NBYTES`. `fields`: fields of the manifest."""
        named = state.buffers() if state.runtime.collectives.rank == 0 else {}
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in named.items()}
        units = state.saved_units(with_frozen)
        on_device = [unit for unit in units if state.view.inventory.find(unit, "param") is None]
        may_copy = sum(unit.nbytes for unit in on_device) <= _MOST_COPIED_NBYTES
        return cls(
            fields=fields,
            needed_nbytes=needed_nbytes(state, buffers.values(), with_frozen),
            buffers=buffers,
            params={unit.index: state.device_flat(unit).to("cpu", copy=True) for unit in on_device if may_copy},
            may_return=may_copy,
            with_frozen=with_frozen,
            save_latest=save_latest,
        )

    def write(
        self,
        state: RunState,
        tag: TagWriter,
        ready: Transfer,
        scalars: Scalars,
        free: Callable[[int], None] = lambda subgroup: None,
    ) -> Share:
        """Write this rank's data, and begin to make it durable. Return the rank's share of the manifest. `ready`:
        completes when the device has computed all that is saved. `free`: called with the index of each sub-group that
        the save no longer reads."""
        ready.wait()
        tensors = list_tensors(state, copied_places(scalars), scalars, self.buffers, with_frozen=self.with_frozen)
        with torch.no_grad():
            StateSaver(state, scalars, tag.writer, free).save(self.buffers, self.params, self.with_frozen)
        return Share(
            tensors=tensors,
            scalars={name: to_json(own, f"state of {name}") for name, own in scalars.by_name().items()},
            driver=own_state(self.fields["driver"]),
            stores=[tag.writer.finish()],
        )

    def publish(self, tag: TagWriter, shares: Sequence[Share]) -> None:
        """Publish the tag. `shares`: each rank's share of the manifest. The data of the other ranks must be durable."""
        driver = join_states(self.fields["driver"], [share.driver for share in shares])
        tag.publish({**self.fields, "driver": driver}, shares, save_latest=self.save_latest)


@final
class AsyncSave:
    """Writes saves during training, one at a time. Called on the driver thread."""

    def __init__(self) -> None:
        # no reference to the engine: the functions that close the run hold `wait`, and would keep the engine alive
        self.tag: TagWriter | None = None
        """The tag of the save under way; None if there is none."""
        self._cut: Transfer = COMPLETED
        """The transfer that completes when the save has begun, between two updates. It fails if an earlier update
        fails."""
        self._end = Completion()
        """Completes when the tag is published or discarded; carries the error of the save."""

    def start(self, state: RunState, policy: UpdatePolicy, tag: TagWriter, capture: Capture, ready: Transfer) -> None:
        """Schedule a save to begin between two updates. Return when everything that a script may change is copied or
        written. `ready`: completes when the device has computed all that is saved."""
        end = Completion()
        try:
            cut = policy.at_cut(partial(_begin_during_training, state, tag, capture, ready, end))
        except BaseException:
            tag.discard()
            raise
        self.tag, self._cut, self._end = tag, cut, end
        if not capture.may_return:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way, if there is one. Raise its error if it has failed; a second call raises
        nothing."""
        tag, end = self.tag, self._end
        if tag is None:
            return
        try:
            self._cut.wait()
            end.wait()
        except Exception as error:
            self.tag = None
            if end.done():
                raise
            tag.discard()  # an update failed before the save began; the engine raises the update's error
            logger.error("checkpoint %s was not written: %s", tag.tag, error)
        self.tag = None


def _begin_during_training(state: RunState, tag: TagWriter, capture: Capture, ready: Transfer, end: Completion) -> None:
    """Start a job on the lane `save` that writes and publishes the tag. Called between two updates. `end`: completes
    when the tag is published, or carries the save's error."""
    held, read = {layout.subgroup.index: Completion() for layout in state.view.layouts}, Completion()

    def write() -> None:
        try:
            with tag, tag.writing():
                share = capture.write(state, tag, ready, scalars, lambda subgroup: held[subgroup].complete())
                capture.publish(tag, [share])
            end.complete()
        except BaseException as error:
            end.fail(error)
            logger.error("the save of checkpoint %s failed, and training goes on: %s", tag.tag, error)
        finally:
            for each in (*held.values(), read):
                each.complete()

    try:
        scalars = state.view.scalars.copy()
        state.pipeline.hold(held, read)
        state.runtime.accelerator.lane("save").submit(write)
    except BaseException as error:
        state.pipeline.hold({})
        tag.discard()
        end.fail(error)
        raise


# -- the bytes of a run ----------------------------------------------------------------------------------------------


SCRATCH_NBYTES = MIB
"""Bytes of a scratch buffer. Data that is not page-aligned is copied to such a buffer before it is written."""

NUM_SCRATCH = 8


@final
class StateSaver:
    """Writes everything that this rank saves. One thread uses it, for one save. `free`: called with the index of each
    sub-group that is written and may change again. Everything else must not change until the save ends."""

    def __init__(self, state: RunState, scalars: Scalars, writer: RecordWriter, free: Callable[[int], None]) -> None:
        self._state = state
        self._io = state.pipeline.io
        self._scalars = scalars
        self._places = copied_places(scalars)
        self._writer = writer
        self._free = free
        memory = memoryview(map_memory(SCRATCH_NBYTES * NUM_SCRATCH))
        starts = range(0, len(memory), SCRATCH_NBYTES)
        self._scratch = [memory[start : start + SCRATCH_NBYTES] for start in starts]
        self._in_flight: deque[tuple[Transfer, memoryview | None]] = deque()
        """Transfers in flight, each with the scratch buffer that it uses, or None."""

    def save(self, buffers: Mapping[str, torch.Tensor], params: Mapping[int, torch.Tensor], with_frozen: bool) -> None:
        """Write everything, and wait. `buffers`: CPU copies, by name. `params`: unit index -> a CPU copy of a unit that
        lives on the device. Raises the first error, once nothing uses the run's memory."""
        try:
            layouts = self._state.own_layouts
            run_ahead(self._io, layouts, self._begin, lambda work: self._free(work.layout.subgroup.index))
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
        has_state, with_params = self._scalars.has_state(layout), layout.masters.needs_params
        work = self._io.open_nowait(layout, "param", initialized=has_state, with_params=with_params)
        return None if work is None else (work, partial(self._send_subgroup, work))

    def _send_subgroup(self, work: SubGroupWork) -> None:
        for read in work.reads:
            self._io.wait(read, work)
        parts = [work.raw[: state_nbytes(work.layout, self._scalars)]]
        if work.layout.masters.needs_params:
            self._io.bind_outputs(work)
            parts += [as_bytes(params) for params in work.outs]
        for part in parts:
            work.writes += self._send(self._places.state(work.layout).record, part)

    # -- parameters without a master, and buffers ----------------------------------------------------------------------

    def _send_unit(self, unit: Unit, copied: torch.Tensor | None) -> None:
        """Save a unit that no update changes, or this rank's shard of the unit. `copied`: a CPU copy of the unit, or
        None."""
        name, home = self._places.unit(unit).record, self._state.view.inventory.find(unit, "param")
        if home is None:
            self._send(name, as_bytes(self._state.device_flat(unit) if copied is None else copied))
        elif (raw := home.slot.tensor) is None:
            self._send_copied(name, self._windows(unit))
        else:
            self._in_flight += [(written, None) for written in self._send(name, raw[: home.slot.nbytes])]

    def _windows(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Read a unit from nvme, and yield its bytes in the same pieces in which they were written."""
        home, staging = self._state.view.inventory.home(unit, "param"), self._state.param_staging
        assert staging is not None, "a tier without views is planned with staging buffers"
        for start in range(0, home.slot.nbytes, staging.buffer_nbytes):  # only whole pieces can be verified
            nbytes = min(staging.buffer_nbytes, home.slot.nbytes - start)
            with staging.lease(nbytes, home.slot.name, lane="update") as lease:
                home.tier.read(home.slot, lease.tensor, start).wait()
                yield lease.tensor[:nbytes]

    def _send_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        def parts() -> Iterator[torch.Tensor]:
            position = 0
            for _, buffer, offset in pack(buffers):
                if offset > position:
                    yield torch.zeros(offset - position, dtype=torch.uint8)
                yield as_bytes(buffer.contiguous())
                position = offset + buffer.nbytes

        self._send_copied("buffers", parts())

    def _send(self, name: str, part: torch.Tensor) -> list[Transfer]:
        """Append `part` to the record `name`. Return the transfers that read `part`; [] if `part` was copied."""
        if part.is_cpu and part.data_ptr() % PAGE_NBYTES == 0 and part.numel() % PAGE_NBYTES == 0:
            return [self._writer.append(name, part.numpy().data)]
        self._send_copied(name, [part])
        return []

    def _send_copied(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """Append copies of `parts` to the record `name` through scratch buffers. Parts may have any device and
        alignment."""
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
        """Append the first `filled` bytes of a buffer to the record `name`, padded with zeros to a whole page."""
        nbytes = align_up(filled, PAGE_NBYTES)
        buffer[filled:nbytes] = bytes(nbytes - filled)
        if nbytes:
            self._in_flight.append((self._writer.append(name, buffer[:nbytes]), buffer))
        else:
            self._scratch.append(buffer)


def needed_nbytes(state: RunState, buffers: Iterable[torch.Tensor], with_frozen: bool) -> int:
    """Return the most bytes that this rank's records can take in a full save."""
    slots = sum(layout.nbytes for layout in state.own_layouts)
    segments = (one for layout in state.own_layouts if layout.masters.needs_params for one in layout.subgroup.segments)
    units = sum(own.nbytes for own in state.saved_units(with_frozen))
    packed = sum(align_up(buffer.nbytes, PACKED_ALIGNMENT_NBYTES) for buffer in buffers)
    return slots + sum(segment.nbytes for segment in segments) + units + align_up(packed, PAGE_NBYTES)
