"""Read the state, parameters and gradients of sub-groups into memory for their update, and write the results to their
homes.

A sub-group is what the optimizer steps at once; the code refers to it by its `StateLayout`. A segment is a unit's part
in one sub-group. Bytes are "staged" if they pass through a staging buffer, because they cannot be updated in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tiered_zero.concurrency.transfer import Transfer, wait_quietly
from tiered_zero.hardware.device.accelerator import THIS_THREAD
from tiered_zero.hardware.memory.host_memory import Lease, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Segment, SubGroup
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.step_gradients import GradientSource
from tiered_zero.tiers.tier import Home, Inventory, UnitUpdate, as_bytes


class ParameterSink(Protocol):
    """The parameters that an update reads and writes, segment by segment. Used by the thread that updates. `kind`: the
    slots to write: "param", or "param_back" for a delayed update. `window`: a segment's part of a staging buffer,
    [nbytes] uint8."""

    def view(self, segment: Segment, kind: str, *, on_device: bool) -> torch.Tensor | None:
        """Return the segment's parameters for an update in place, [numel] of the unit's dtype; None if they pass
        through a staging buffer. `on_device`: whether the update runs on the device."""

    def read(self, segment: Segment, kind: str, window: torch.Tensor | None) -> Transfer | None:
        """Copy the segment's present parameters to `window`, or to the slot of `kind` if `window` is None. Return the
        transfer; None if the copy is complete, or if no copy is needed."""

    def write(
        self, segment: Segment, kind: str, window: torch.Tensor, after: Transfer, unit_update: UnitUpdate | None
    ) -> tuple[Transfer, int | None]:
        """Start to write new values from `window` to their home, after the transfer `after`. Return (transfer, offset).

        `unit_update`: the update of the segment's unit; None if no fetch waits for this update. `offset`: the segment's
        first byte in the unit, if fetches may copy from `window` during the write; else None."""


@dataclass(eq=False, repr=False)
class UnitParameters:
    """Reads and writes the parameters of an engine's units for updates (a `ParameterSink`). A resident unit, which
    always stays on the device, has no "param" home: its parameters are in the flat that `_device_flat` returns."""

    _inventory: Inventory
    _runtime: Runtime
    _device_flat: Callable[[Unit], torch.Tensor]

    def view(self, segment: Segment, kind: str, *, on_device: bool) -> torch.Tensor | None:
        home = self._inventory.find(segment.unit, kind)
        if home is None:
            return segment.part_of(self._device_flat(segment.unit)) if on_device else None
        return home.view_of(segment) if on_device == (home.tier.name == "device") else None

    def read(self, segment: Segment, kind: str, window: torch.Tensor | None) -> Transfer | None:
        home = self._inventory.find(segment.unit, "param")
        if home is None:
            return None  # the unit is resident and updated on the device
        if window is not None:
            return home.tier.read(home.slot, window, home.offset_of(segment))
        if kind != "param":
            target = self._inventory.home(segment.unit, kind)
            old, new = home.view_of(segment), target.view_of(segment)
            assert old is not None and new is not None, "both homes of a unit are on one tier"
            new.copy_(old)
        return None

    def write(
        self, segment: Segment, kind: str, window: torch.Tensor, after: Transfer, unit_update: UnitUpdate | None
    ) -> tuple[Transfer, int | None]:
        accelerator = self._runtime.accelerator
        home = self._inventory.find(segment.unit, kind)
        if home is not None:
            offset = home.offset_of(segment)
            written = home.tier.write(home.slot, window, offset, after)
            if unit_update is None:
                return written, None
            unit_update.add_pending(offset, window)
            return written, offset
        target = as_bytes(segment.part_of(self._device_flat(segment.unit)))
        copy = accelerator.lane("write_back").submit(
            lambda: accelerator.copy(target, window), after=[after], holds=[target]
        )
        return copy, None


@dataclass(kw_only=True)
class SubGroupWork:
    """One sub-group that is being read, updated or written.

    `raw`: the state, [n] uint8, in place or in the staging buffer. `lease`: the staging buffer; None if nothing is
    staged. `is_staged`: whether the state is staged. `on_device`: whether the update runs on the device. `pending`:
    (`UnitUpdate`, first byte in the unit) of each staged part that is not written yet. Until then, fetches may copy the
    part from the staging buffer.

    Lists with an entry for each segment: `windows`: the memory of staged parameters; None if they are not staged.
    `grad_windows`: the memory for gradients read from NVMe; None for other gradients. `outs`: the memory to which the
    rule writes parameters, [numel]. Windows are parts of the staging buffer, [nbytes] uint8."""

    layout: StateLayout
    param_kind: str
    raw: torch.Tensor
    lease: Lease | None
    home: Home
    on_device: bool
    is_staged: bool
    windows: list[torch.Tensor | None]
    grad_windows: list[torch.Tensor | None]
    reads_gradients: bool = False
    """Whether the reads of `grad_windows` have begun."""
    reads: list[Transfer] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    pending: list[tuple[UnitUpdate, int]] = field(default_factory=list)

    def is_written(self) -> bool:
        return all(write.done() for write in self.writes)


@dataclass(eq=False, repr=False)
class SubGroupIO:
    """Reads sub-groups into memory for their update, and writes the results to their homes. Used by one thread at a
    time. A staging buffer holds the staged bytes of one sub-group, in this order: state, parameters, gradients.
    `_gradient_dtypes`: unit with gradients on NVMe -> their dtype."""

    _inventory: Inventory
    _runtime: Runtime
    _staging: StagingPool | None
    _params: ParameterSink
    _gradient_dtypes: Mapping[Unit, torch.dtype] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        """The number of free staging buffers."""
        return self._staging.num_free if self._staging is not None else 0

    def updates_on_device(self, subgroup: SubGroup) -> bool:
        return self._inventory.home(subgroup, "state").tier.name == "device"

    def reads(self, layout: StateLayout) -> bool:
        """Return whether an update of the sub-group must first read state, parameters or gradients."""
        home = self._inventory.home(layout.subgroup, "state")
        is_staged = home.slot.tensor is None
        return is_staged or layout.masters.needs_params or bool(self._gradient_dtypes)

    # -- in ------------------------------------------------------------------------------------------------------------

    def open_nowait(
        self,
        layout: StateLayout,
        param_kind: str,
        *,
        initialized: bool,
        reads: bool = True,
        with_params: bool = True,
        with_gradients: bool = False,
    ) -> SubGroupWork | None:
        """Start to read a sub-group, and return its `SubGroupWork`; None if it needs a staging buffer and none is free.
        `param_kind`: the kind of slot with the parameters, "param" or "param_back". `initialized`: whether the slot
        holds state in addition to masters. `reads`: whether to read what the slots hold; False if the caller replaces
        all of it. `with_params`, `with_gradients`: whether the caller uses parameters and gradients too."""
        home = self._inventory.home(layout.subgroup, "state")
        raw, on_device = home.slot.tensor, home.tier.name == "device"
        segments = layout.subgroup.segments
        sizes = [layout.nbytes if raw is None else 0]
        for segment in segments:
            is_staged = with_params and self._params.view(segment, param_kind, on_device=on_device) is None
            sizes.append(segment.nbytes if is_staged else 0)
        for segment in segments:
            dtype = self._gradient_dtypes.get(segment.unit) if with_gradients else None
            sizes.append(0 if dtype is None else segment.numel * dtype.itemsize)
        lease: Lease | None = None
        if any(sizes):
            assert self._staging is not None, "staged sub-groups are planned with staging buffers"
            lease = self._staging.lease_nowait(sum(sizes), f"sub-group {layout.subgroup.index}")
            if lease is None:
                return None
        memory = torch.empty(0, dtype=torch.uint8) if lease is None else lease.tensor
        staged, *parts = memory[: sum(sizes)].split_with_sizes(sizes)
        windows = [part if part.numel() else None for part in parts]
        work = SubGroupWork(
            layout=layout,
            param_kind=param_kind,
            raw=staged if raw is None else raw,
            lease=lease,
            home=home,
            on_device=on_device,
            is_staged=bool(sizes[0]),
            windows=windows[: len(segments)],
            grad_windows=windows[len(segments) :],
        )
        nbytes = layout.nbytes if initialized else layout.initial_nbytes
        try:
            if reads and work.is_staged and nbytes:
                work.reads.append(home.tier.read(home.slot, work.raw[:nbytes]))
            if reads and layout.masters.needs_params:  # the old parameters, to the memory for the new ones
                for segment, window in zip(segments, work.windows, strict=True):
                    if (read := self._params.read(segment, param_kind, window)) is not None:
                        work.reads.append(read)
        except Exception:
            self.cancel([work])
            raise
        return work

    def bind_outputs(self, work: SubGroupWork) -> None:
        """Set `work.outs`, the memory for new parameters. Called right before the update, because a delayed update
        swaps the homes of parameters. If the update must copy parameters that user code has changed to their masters,
        also read the present parameters to `work.windows`."""
        work.outs = []
        for segment, window in zip(work.layout.subgroup.segments, work.windows, strict=True):
            if window is None:
                out = self._params.view(segment, work.param_kind, on_device=work.on_device)
                assert out is not None, "a segment without a window is updated in place"
            elif work.on_device:
                out = torch.empty(segment.numel, dtype=segment.unit.dtype, device=work.raw.device)
            else:
                out = window.view(segment.unit.dtype)
            if work.layout.masters.follows_params and window is not None:  # not earlier: the user may change them
                read = self._params.read(segment, work.param_kind, window)
                if read is not None:
                    self.wait(read, work)
            work.outs.append(out)

    def read_gradients(self, work: SubGroupWork, gradients: GradientSource) -> None:
        """Start to read the sub-group's gradients from NVMe, unless an earlier call has done so. All gradients of the
        sub-group must be complete."""
        if work.reads_gradients:
            return
        work.reads_gradients = True
        for segment, window in zip(work.layout.subgroup.segments, work.grad_windows, strict=True):
            if window is not None and (read := gradients.read_part(segment, window)) is not None:
                work.reads.append(read)

    # -- out -----------------------------------------------------------------------------------------------------------

    def write(
        self,
        work: SubGroupWork,
        unit_updates: Mapping[Unit, UnitUpdate],
        after: Transfer,
        *,
        masters_alone: bool = False,
    ) -> None:
        """Start to write a sub-group's state and parameters. `unit_updates`: unit -> its `UnitUpdate`, which gets the
        staged parameters, so that fetches can copy them before they are written. `after`: parameters on the device are
        written after this transfer. `masters_alone`: whether the slot holds masters and no other state."""
        home, on_device = work.home, work.on_device
        if work.is_staged:
            nbytes = work.layout.master_nbytes if masters_alone else work.layout.nbytes
            work.writes.append(home.tier.write(home.slot, work.raw[:nbytes]))
        if on_device and any(window is not None for window in work.windows):  # on this stream, which has computed them
            for window, out in zip(work.windows, work.outs, strict=True):
                if window is not None:
                    self._runtime.accelerator.copy(window, as_bytes(out))
            self._runtime.accelerator.record().wait()
        for segment, window in zip(work.layout.subgroup.segments, work.windows, strict=True):
            if window is not None:
                unit_update = unit_updates.get(segment.unit)
                written, offset = self._params.write(segment, work.param_kind, window, after, unit_update)
                work.writes.append(written)
                if unit_update is not None and offset is not None:
                    work.pending.append((unit_update, offset))
        if on_device and THIS_THREAD.is_lane:  # compute does not wait for the lane's stream
            work.writes.append(self._runtime.accelerator.record())

    def finish(self, work: SubGroupWork) -> None:
        """Wait until all writes of the work are done, and release its staging buffer."""
        for event in reversed(work.writes):  # a lane completes in order: wait once, for its last write
            self.wait(event, work)
        for unit_update, offset in work.pending:
            unit_update.retire(offset)
        if work.lease is not None:
            work.lease.release()

    def cancel(self, works: Sequence[SubGroupWork]) -> None:
        """Drop `works`: wait for their transfers, ignore errors, and release their staging buffers."""
        for work in works:
            for event in (*work.reads, *work.writes):
                with self._span(work):
                    wait_quietly(event)
            if work.lease is not None:
                work.lease.release()

    def wait(self, event: Transfer, work: SubGroupWork) -> None:
        with self._span(work):
            event.wait()

    def _span(self, work: SubGroupWork) -> AbstractContextManager[None]:
        return self._runtime.recorder.span("update", "wait_state", f"sub-group {work.layout.subgroup.index}")
