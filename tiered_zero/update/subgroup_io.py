"""A sub-group's way to where it is updated, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from tiered_zero.hardware.runtime import Runtime
from tiered_zero.hardware.staging import Lease, StagingPool
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Segment, SubGroup
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.tier import BufferView, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.transfer import Transfer


@dataclass
class SubGroupWork:
    """One sub-group on its way. `param_kind`: which home of a unit takes the new parameters ("param", or "param_back"
    behind the scenes). `raw`: [n] uint8, its state, in place or staged. `lease`: staged state, then the staged 16-bit
    parameters. `reads`: the transfers that fill the state and, where masters need them, the parameters. `outs`: where
    the rule writes each segment's parameters: [numel] of the unit's dtype. `handed`: which staged parameters, by their
    first byte in the unit, are handed over until they are written. `is_last`: its state is not read again.
    """

    subgroup: SubGroup
    layout: StateLayout
    param_kind: str
    raw: torch.Tensor
    lease: Lease | None
    reads: list[Transfer] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    writes: list[Transfer] = field(default_factory=list)
    handed: list[tuple[UnitUpdate, int]] = field(default_factory=list)
    is_last: bool = False


class SubGroupIO:
    """Opens sub-groups and sends them home. Any one thread at a time.

    `device_flat`: the flat of a unit that lives on the device. A staging buffer holds one sub-group's state and, where
    parameters are not updated in place, its 16-bit parameters.
    """

    def __init__(
        self,
        inventory: Inventory,
        runtime: Runtime,
        staging: StagingPool | None,
        device_flat: Callable[[Unit], torch.Tensor],
    ) -> None:
        self._inventory = inventory
        self._runtime = runtime
        self._staging = staging
        self._device_flat = device_flat

    @property
    def num_free(self) -> int:
        """Staging buffers that nobody holds."""
        return self._staging.num_free if self._staging is not None else 0

    def updates_on_device(self, subgroup: SubGroup) -> bool:
        return self._inventory.home(subgroup, "state").tier.name == "device"

    # -- in ------------------------------------------------------------------------------------------------------------

    def outlasting(self, subgroup: SubGroup) -> SubGroup:
        """The part of a sub-group whose parameters rest on the device, and outlast the engine."""
        return replace(
            subgroup, segments=tuple(s for s in subgroup.segments if self._inventory.find(s.unit, "param") is None)
        )

    def open_nowait(
        self, layout: StateLayout, param_kind: str, *, born: bool, part: SubGroup | None = None
    ) -> SubGroupWork | None:
        """A sub-group with its reads under way; None while no staging buffer is free. `born`: it has state beside its
        masters. `part`: the segments that are updated, for the last time: no more than they need is read, and their
        state is not written; None: all."""
        home = self._inventory.home(layout.subgroup, "state")
        raw = home.tier.view(home.slot)
        staged = raw is None
        lease: Lease | None = None
        nbytes = (layout.nbytes if staged else 0) + self._out_nbytes(param_kind, layout.subgroup)
        if nbytes:
            assert self._staging is not None, "staged sub-groups are planned with staging buffers"
            lease = self._staging.lease_nowait(nbytes, f"sub-group {layout.subgroup.index}")
            if lease is None:
                return None
        if raw is None:
            assert lease is not None
            raw = lease.tensor[: layout.nbytes]
        work = SubGroupWork(part or layout.subgroup, layout, param_kind, raw, lease, is_last=part is not None)
        try:
            if staged and lease is not None:
                stored = layout.nbytes if born else layout.master_nbytes
                spans = [(0, stored)] if part is None else layout.spans(part)
                for start, last in spans:
                    if start < (stop := min(last, stored)):
                        window = BufferView(raw[start:stop], lease.memory[start:stop])
                        work.reads.append(home.tier.read(home.slot, window, start))
            if layout.masters.needs_params:
                self._read_params(work)
        except BaseException:
            self.abandon([work])
            raise
        return work

    def _read_params(self, work: SubGroupWork) -> None:
        """The old parameters to where the new ones will stand; they are there already where those replace them."""
        for segment, window in self._staged_outs(work):
            home = self._inventory.find(segment.unit, "param")
            if home is None:
                continue  # on the device, and updated there
            if window is not None:
                work.reads.append(home.tier.read(home.slot, window, segment.unit_offset))
            elif work.param_kind != "param":
                old, new = (self._out_view(kind, work.subgroup, segment) for kind in ("param", work.param_kind))
                assert old is not None and new is not None, "both homes of a unit are on one tier"
                new.copy_(old)

    def make_outs(self, work: SubGroupWork) -> None:
        """Beside the state, or where the parameters belong."""
        work.outs = []
        for segment, window in self._staged_outs(work):
            view = self._out_view(work.param_kind, work.subgroup, segment)
            if view is None and self.updates_on_device(work.subgroup):
                view = torch.empty(segment.numel, dtype=segment.unit.dtype, device=work.raw.device)
            elif view is None:
                assert window is not None, "a segment without a view is staged"
                view = window.tensor.view(segment.unit.dtype)
            work.outs.append(view)

    def _out_nbytes(self, param_kind: str, subgroup: SubGroup) -> int:
        return sum(s.nbytes for s in subgroup.segments if self._out_view(param_kind, subgroup, s) is None)

    def _out_view(self, param_kind: str, subgroup: SubGroup, segment: Segment) -> torch.Tensor | None:
        """The parameters' final place, [numel] of their dtype, where the update can write it directly."""
        unit = segment.unit
        on_device = self.updates_on_device(subgroup)
        home = self._inventory.find(unit, param_kind)
        if home is None:
            return segment.part_of(self._device_flat(unit)) if on_device else None
        raw = home.tier.view(home.slot)
        return None if raw is None or on_device else segment.part_of(raw[: unit.nbytes].view(unit.dtype))

    def _staged_outs(self, work: SubGroupWork) -> Iterator[tuple[Segment, BufferView | None]]:
        """Each segment with its part of the lease, or None where it is written in place."""
        home = self._inventory.home(work.subgroup, "state")
        start = work.layout.nbytes if home.tier.view(home.slot) is None else 0
        for segment in work.subgroup.segments:
            if self._out_view(work.param_kind, work.subgroup, segment) is not None:
                yield segment, None
                continue
            assert work.lease is not None
            stop = start + segment.nbytes
            yield segment, BufferView(work.lease.tensor[start:stop], work.lease.memory[start:stop])
            start = stop

    # -- out -----------------------------------------------------------------------------------------------------------

    def write(self, work: SubGroupWork, unit_updates: Mapping[int, UnitUpdate]) -> None:
        """Start the way home of the state and of the parameters. `unit_updates`: unit index -> who may want them
        sooner."""
        home = self._inventory.home(work.subgroup, "state")
        if home.tier.view(home.slot) is None and not work.is_last:
            assert work.lease is not None
            nbytes = work.layout.nbytes
            work.writes.append(home.tier.write(home.slot, BufferView(work.raw, work.lease.memory[:nbytes])))
        for (segment, window), out in zip(self._staged_outs(work), work.outs, strict=True):
            if window is not None:
                self._send(work, unit_updates.get(segment.unit.index), segment, window, out)

    def _send(
        self,
        work: SubGroupWork,
        unit_update: UnitUpdate | None,
        segment: Segment,
        window: BufferView,
        out: torch.Tensor,
    ) -> None:
        accelerator = self._runtime.accelerator
        if self.updates_on_device(work.subgroup):
            target = window.tensor
            accelerator.lane("update").submit(
                lambda: accelerator.copy(target, as_bytes(out)), after=[accelerator.record_compute()], holds=[out]
            ).wait()
        home = self._inventory.find(segment.unit, work.param_kind)
        if home is not None:
            offset = segment.unit_offset
            work.writes.append(home.tier.write(home.slot, window, offset))
            if unit_update is not None:
                unit_update.add_pending(offset, window.tensor, accelerator.copy)
                work.handed.append((unit_update, offset))
            return
        target = as_bytes(segment.part_of(self._device_flat(segment.unit)))
        event = accelerator.lane("update").submit(
            lambda: accelerator.copy(target, window.tensor), after=[accelerator.record_compute()], holds=[target]
        )
        work.writes.append(event)

    def end(self, work: SubGroupWork) -> None:
        """Wait until the work is written, and give its buffer back."""
        for event in work.writes:
            self.wait(event, work)
        for unit_update, offset in work.handed:
            unit_update.retire(offset, self._runtime.accelerator.copy)
        if work.lease is not None:
            work.lease.release()

    def abandon(self, works: Sequence[SubGroupWork]) -> None:
        """They are not wanted any more: what still uses the staging buffers ends, well or badly, and the buffers go
        back."""
        for work in works:
            for event in (*work.reads, *work.writes):
                with suppress(Exception):
                    self.wait(event, work)
            if work.lease is not None:
                work.lease.release()

    def wait(self, event: Transfer, work: SubGroupWork) -> None:
        with self._runtime.recorder.span("update", "wait_state", f"sub-group {work.subgroup.index}"):
            event.wait()
