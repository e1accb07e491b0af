"""Read and write a rank's optimizer state: masters and arrays in the slots of sub-groups, scalars in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import InternalError
from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment
from tiered_zero.rules.optimizer_copy import flattened, nested, same
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.state_layout import Parts, StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.slots import leased_slot, read_slot, write_slot
from tiered_zero.tiers.tier import BufferView, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate

MASTER = "master"
"""The key of a 16-bit parameter's fp32 master in the state_dict of an optimizer without an engine."""

ParamState = dict[str, Any]
"""One parameter's state as `torch.optim.Optimizer.state` holds it: arrays of any shape, 0-d tensors, plain values."""

PieceScalars = Mapping[int, Mapping[str, Any]]
"""Index of a piece -> its `Run.scalars`."""


@final
class Scalars:
    """The scalars of the pieces that were stepped, by sub-group. A sub-group without an entry has masters and no other
    state; a piece without an entry has no state. Neighbouring pieces that share one object of scalars are stepped
    together."""

    def __init__(self, layouts: Sequence[StateLayout], of_subgroups: Mapping[int, PieceScalars] | None = None) -> None:
        self._layouts = layouts
        self._of = dict(of_subgroups or {})

    def has_state(self, layout: StateLayout) -> bool:
        """Return whether the sub-group's slot holds state in addition to masters, as it does after its first update."""
        return layout.subgroup.index in self._of

    @property
    def subgroups(self) -> list[int]:
        """The indices of the sub-groups that have state."""
        return sorted(self._of)

    def of(self, layout: StateLayout) -> PieceScalars:
        return self._of.get(layout.subgroup.index, {})

    def stepped(self, layout: StateLayout) -> list[ParamPiece]:
        """Return the pieces of a sub-group that have state."""
        own = self.of(layout)
        return [piece for piece in layout.subgroup.pieces if own.get(piece.index)]

    def replace(self, layout: StateLayout, scalars: PieceScalars) -> None:
        """Replace a sub-group's scalars; its slot now holds state."""
        self._of[layout.subgroup.index] = scalars

    def drop(self, layout: StateLayout) -> None:
        """Drop a sub-group's scalars: its slot now holds masters alone, and its next step initializes state."""
        self._of.pop(layout.subgroup.index, None)

    def copy(self) -> Scalars:
        """Copy the present scalars. An update replaces entries and changes none."""
        return Scalars(self._layouts, self._of)

    def by_name(self) -> dict[str, Mapping[str, Any]]:
        """Return parameter name -> scalars for all parameters with state. Raises InternalError if pieces of one
        disagree."""
        found: dict[str, Mapping[str, Any]] = {}
        for layout in self._layouts:
            scalars = self.of(layout)
            for piece in layout.subgroup.pieces:
                own, name = scalars.get(piece.index, {}), piece.param.name
                if not same(dict(found.setdefault(name, own)), dict(own)):
                    raise InternalError(
                        f"The parts of parameter {name} were expected to have made the same steps; found {own} and "
                        f"{found[name]}. This state cannot be saved; go on from an earlier checkpoint."
                    )
        return {name: own for name, own in found.items() if own}


@final
class StateView:
    """The masters, state arrays and scalars of this rank's sub-groups, on whatever tier their slots are.

    The only class that knows how they are stored: all reads and writes between two updates go through it. It keeps one
    invariant: a parameter's value is its master rounded to the parameter's dtype. Used by the driver between steps and
    by the stepping thread within them; access to a slot blocks.
    """

    def __init__(
        self, layouts: Sequence[StateLayout], rule: UpdateRule, inventory: Inventory, staging: StagingPool | None
    ) -> None:
        self.layouts = layouts
        self.rule = rule
        self.inventory = inventory
        self.staging = staging
        self.scalars = Scalars(layouts)
        self._segments_of: dict[int, list[tuple[StateLayout, Segment]]] = {}
        """Unit -> its parts, in order."""
        for layout in layouts:
            for segment in layout.subgroup.segments:
                self._segments_of.setdefault(segment.unit.index, []).append((layout, segment))

    # -- masters, unit by unit -----------------------------------------------------------------------------------------

    @property
    def need_params(self) -> bool:
        """Whether masters are computed from the parameters and stored bits."""
        return any(layout.masters.needs_params for layout in self.layouts)

    def cuts(self, unit: Unit) -> list[int]:
        """Return the first element of each part of the unit that a sub-group holds."""
        return [segment.unit_start for _, segment in self._segments(unit)]

    def store_masters(self, unit: Unit, flat: torch.Tensor) -> None:
        """Store the initial masters of the unit from `flat`, [P] fp32 on the CPU."""
        for layout, segment in self._segments(unit):
            parts = [torch.zeros(segment.numel, dtype=dtype) for dtype in layout.masters.dtypes]
            layout.masters.replace(parts, segment.part_of(flat))
            self._write(layout, segment, parts)

    def replace_masters(self, unit: Unit, flat: torch.Tensor) -> None:
        """Set every master of the unit from `flat`, [P] fp32 on the CPU. The parameters already hold the rounded
        values."""
        for layout, segment in self._segments(unit):
            parts = self._read(layout, segment)
            layout.masters.replace(parts, segment.part_of(flat))
            self._write(layout, segment, parts)

    def follow(self, unit: Unit, flat: torch.Tensor, old: torch.Tensor | None = None) -> None:
        """Update the masters after user code changed the parameters: a master that does not round to its new parameter
        takes that value. `flat`: the new parameters, [P] of the unit's dtype on the CPU. `old`: the former ones, [P],
        if masters need them."""
        for layout, segment in self._segments(unit):
            before = None if old is None else segment.part_of(old)
            if parts := layout.masters.follow(self._read(layout, segment), segment.part_of(flat), before):
                self._write(layout, segment, parts)

    def read_masters(self, unit: Unit, params: torch.Tensor | None = None) -> torch.Tensor:
        """Read the unit's masters, [P] fp32, to the CPU; zeros where no sub-group holds the unit. `params`: the
        parameters, [P], if masters need them."""
        flat = torch.zeros(unit.numel)
        for layout, segment in self._segments(unit):
            own = None if params is None else segment.part_of(params)
            segment.part_of(flat).copy_(layout.masters.join(self._read(layout, segment), own))
        return flat

    def _read(self, layout: StateLayout, segment: Segment) -> list[torch.Tensor]:
        home = self.inventory.home(layout.subgroup, "state")
        spans = layout.master_spans(segment)
        return [read_slot(home, start, nbytes, self.staging).view(dtype) for start, nbytes, dtype in spans]

    def _write(self, layout: StateLayout, segment: Segment, parts: Parts) -> None:
        home = self.inventory.home(layout.subgroup, "state")
        for part, (start, _, _) in zip(parts, layout.master_spans(segment), strict=True):
            write_slot(home, start, part, self.staging)

    def _segments(self, unit: Unit) -> Sequence[tuple[StateLayout, Segment]]:
        return self._segments_of.get(unit.index, ())

    # -- arrays and scalars, sub-group by sub-group --------------------------------------------------------------------

    def leased(
        self, layout: StateLayout, read: slice, write: slice | None = None
    ) -> AbstractContextManager[torch.Tensor]:
        """Lease the bytes of a sub-group's slot; see `leased_slot`."""
        return leased_slot(self.inventory.home(layout.subgroup, "state"), self.staging, read, write)

    def initialize(
        self,
        layout: StateLayout,
        raw: torch.Tensor,
        pieces: Sequence[ParamPiece],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Initialize the state of `pieces` in `raw`, the slot's bytes, which are zero there."""
        views = layout.views(raw)
        for piece in pieces:
            self.rule.init_state(layout.state(raw, piece, piece.start, piece.stop, views), groups[piece.group])

    def export(self, layout: StateLayout, raw: torch.Tensor, piece: ParamPiece, into: ParamState) -> None:
        """Copy the state of a stepped piece, in torch's format, into `into`, the state of its whole parameter. `raw`:
        the slot's bytes."""
        state = layout.state(raw, piece, piece.start, piece.stop)
        if layout.masters.needs_params:
            for name in state.keys() & {self.rule.unsigned_field}:
                state[name] = state[name].abs()  # the sign bits belong to the masters
        values = self.rule.export_state(state, self.scalars.of(layout)[piece.index])
        if layout.has_own_masters:
            master = layout.master(raw)[piece.start : piece.stop]
            state[MASTER] = values[MASTER] = master if self.rule.elementwise else piece.param.view(master)
        for name, value in values.items():
            if isinstance(value, (list, tuple, dict)):
                into[name] = nested({key: _on_cpu(item) for key, item in flattened({name: value}).items()})[name]
            elif name not in state or not isinstance(value, torch.Tensor):
                into[name] = value
            elif not self.rule.elementwise:
                into[name] = value.to("cpu", copy=True)
            else:
                if name not in into:
                    into[name] = piece.param.view(torch.empty(piece.param.numel, dtype=value.dtype))
                _cut(piece, into[name]).copy_(value)

    def fill(
        self,
        layout: StateLayout,
        raw: torch.Tensor,
        given: Mapping[int, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        *,
        anew: bool,
    ) -> int:
        """Set the pieces of `given` (by index) from the state of their whole parameters: the inverse of `export`.
        `anew`: also initialize all other pieces. Returns the number of arrays that were rounded."""
        marks = layout.marks(raw)
        signs = None if marks is None else marks.clone()
        before: PieceScalars = {} if anew else self.scalars.of(layout)
        if anew:
            raw[layout.state_start : layout.nbytes].zero_()
            others = [piece for piece in layout.subgroup.pieces if piece.index not in given]
            self.initialize(layout, raw, others, groups)
        last: Mapping[str, Any] = {}
        scalars, num_rounded = dict(before), 0
        for piece in layout.subgroup.pieces:
            if piece.index not in given:
                continue
            state, values = layout.state(raw, piece, piece.start, piece.stop), dict(given[piece.index])
            master = values.pop(MASTER, None)
            if master is not None and layout.has_own_masters:
                layout.master(raw)[piece.start : piece.stop].copy_(_cut(piece, master))
            for name in state.keys() & values.keys() if self.rule.elementwise else ():
                if isinstance(values[name], torch.Tensor):
                    values[name] = _cut(piece, values[name])
            new = self.rule.import_state(values, state, groups[piece.group])
            num_rounded += self._num_rounded(state, new, values)
            known = last, before.get(piece.index, {})
            last = next((own for own in known if same(own, new)), new)  # neighbours share one object, see `Scalars`
            scalars[piece.index] = last
        if marks is not None and signs is not None:
            marks.abs_().copysign_(signs)  # the sign bits belong to the masters
        self.scalars.replace(layout, scalars)
        return num_rounded

    def _num_rounded(
        self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], values: Mapping[str, Any]
    ) -> int:
        """Count the arrays in `values` that lost bits when they were stored in `state`."""
        narrow = [
            name
            for name in values.keys() & state.keys()
            if isinstance(values[name], torch.Tensor) and state[name].dtype.itemsize < values[name].dtype.itemsize
        ]
        kept = self.rule.export_state(state, scalars) if narrow else {}
        return sum(not torch.equal(kept[name].cpu(), values[name].detach().cpu()) for name in narrow)


def _on_cpu(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _cut(piece: ParamPiece, value: torch.Tensor) -> torch.Tensor:
    """Return the piece's elements, [numel], of an array over its whole parameter."""
    return piece.param.flatten(value.detach())[piece.param_start : piece.param_start + piece.numel]


# -- places ----------------------------------------------------------------------------------------------------------


class GradientSource(Protocol):
    """The gradients of one step; `StepGradients` holds those of an engine. One thread at a time."""

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        """Return whether the parameter has a gradient in this step."""

    def has_arrived(self, unit: Unit) -> bool:
        """Return whether `wait_transfers` would return at once."""

    def wait_transfers(self, unit: Unit) -> None:
        """Block until the unit's gradients are readable by `part`."""

    def on_device(self, unit: Unit) -> bool:
        """Return whether `part` returns memory on the device."""

    def part(self, segment: Segment) -> torch.Tensor:
        """Return a view of the gradients of a segment, [numel]; elements of parameters without a gradient are
        undefined."""

    def read_part(self, segment: Segment, out: BufferView) -> Transfer | None:
        """Start to read the gradients of a segment from NVMe into all of `out`. Return None if they are not there."""

    def release(self, unit: Unit) -> None:
        """Release the unit's gradients: its update is computed."""

    def release_all(self) -> None:
        """Release all gradients: the update has ended or failed."""


class ParameterSink(Protocol):
    """The parameters that an update writes, segment by segment. Used by the thread that steps. `kind`: "param", or
    "param_back" for a delayed update."""

    def is_resident(self, segment: Segment) -> bool:
        """Return whether the parameters rest on the device and outlive the run there."""

    def view(self, segment: Segment, kind: str, *, on_device: bool) -> torch.Tensor | None:
        """Return a view, [numel] of the unit's dtype, that the update can write in place; None if new values go through
        a staging buffer."""

    def read(self, segment: Segment, kind: str, window: BufferView | None) -> Transfer | None:
        """Start to copy the present values to `window` or, if that is None, to the view of `kind`. Return None if they
        are there already."""

    def write(
        self, segment: Segment, kind: str, window: BufferView, after: Transfer, unit_update: UnitUpdate | None
    ) -> tuple[Transfer, int | None]:
        """Start to write new values from host memory to their home. Returns the transfer and the offset of the bytes
        that `unit_update` forwards until it is done. `after`: what compute has launched; it may still read the
        parameters."""


@dataclass(eq=False, repr=False)
class UnitParameters:
    """The parameters of an engine's units, in their homes or in the flats of units that live on the device.
    `_device_flat`: returns the flat of a unit that lives on the device."""

    _inventory: Inventory
    _runtime: Runtime
    _device_flat: Callable[[Unit], torch.Tensor]

    def is_resident(self, segment: Segment) -> bool:
        return self._inventory.find(segment.unit, "param") is None

    def view(self, segment: Segment, kind: str, *, on_device: bool) -> torch.Tensor | None:
        home = self._inventory.find(segment.unit, kind)
        if home is None:
            return segment.part_of(self._device_flat(segment.unit)) if on_device else None
        return home.view_of(segment) if on_device == (home.tier.name == "device") else None

    def read(self, segment: Segment, kind: str, window: BufferView | None) -> Transfer | None:
        home = self._inventory.find(segment.unit, "param")
        if home is None:
            return None  # on the device, and updated there
        if window is not None:
            return home.tier.read(home.slot, window, home.offset_of(segment))
        if kind != "param":
            target = self._inventory.home(segment.unit, kind)
            old, new = home.view_of(segment), target.view_of(segment)
            assert old is not None and new is not None, "both homes of a unit are on one tier"
            new.copy_(old)
        return None

    def write(
        self, segment: Segment, kind: str, window: BufferView, after: Transfer, unit_update: UnitUpdate | None
    ) -> tuple[Transfer, int | None]:
        accelerator = self._runtime.accelerator
        home = self._inventory.find(segment.unit, kind)
        if home is not None:
            offset = home.offset_of(segment)
            written = home.tier.write(home.slot, window, offset, after)
            if unit_update is None:
                return written, None
            unit_update.add_pending(offset, window.tensor)
            return written, offset
        target = as_bytes(segment.part_of(self._device_flat(segment.unit)))
        copy = accelerator.lane("write_back").submit(
            lambda: accelerator.copy(target, window.tensor), after=[after], holds=[target]
        )
        return copy, None
