"""Places of the elements of each key of the portable form: which bytes of which records, in which form.

A full save copies each slot to a record, an in-place commit leaves it where it rests: the two say here how they name
their records, and everything else of the list is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

import torch

from tiered_zero.checkpoint.index import Part, RecordName, Source, TensorEntry
from tiered_zero.checkpoint.portable import RunState, buffer_key, field_range, field_spec, master_key, param_key
from tiered_zero.checkpoint.tensors import describe
from tiered_zero.layout.flat import PACKED_ALIGNMENT_NBYTES, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.sizes import align_up
from tiered_zero.tiers.inventory import Home
from tiered_zero.update.state_view import Scalars

Place = tuple[RecordName, int]
"""A record, and the first byte in it."""


class RecordPlaces(ABC):
    """Names the records of what this rank saves."""

    @abstractmethod
    def state(self, layout: StateLayout) -> RecordName:
        """The slot of a sub-group."""

    @abstractmethod
    def params(self, layout: StateLayout, segment: Segment) -> Place:
        """The parameters of a segment, where they are half of their masters."""

    @abstractmethod
    def unit(self, unit: Unit) -> RecordName:
        """This rank's elements of a unit that no update writes."""

    @abstractmethod
    def buffers(self) -> RecordName:
        """All buffers, as `pack` lays them."""


@final
class CommittedPlaces(RecordPlaces):
    """Records of the stores that the run uses. `copies`: unit index -> home of its durable copy; `buffers`: that of
    buffers. `tiers`: those of this rank's stores, in order."""

    def __init__(
        self, state: RunState, tiers: Sequence[object], copies: Mapping[int, Home], buffers: Home | None
    ) -> None:
        self._inventory = state.inventory
        self._tiers = tiers
        self._copies = copies
        self._buffers = buffers

    def state(self, layout: StateLayout) -> RecordName:
        return self._name(self._inventory.home(layout.subgroup, "state"))

    def params(self, layout: StateLayout, segment: Segment) -> Place:
        home = self._home(segment.unit)
        return self._name(home), home.offset_of(segment)

    def unit(self, unit: Unit) -> RecordName:
        return self._name(self._home(unit))

    def buffers(self) -> RecordName:
        assert self._buffers is not None, "buffers are planned with a record"
        return self._name(self._buffers)

    def _home(self, unit: Unit) -> Home:
        return self._copies.get(unit.index) or self._inventory.home(unit, "param")

    def _name(self, home: Home) -> RecordName:
        return RecordName(self._tiers.index(home.tier), home.slot.name)


@final
class CopiedPlaces(RecordPlaces):
    """Records of a full save: of a sub-group its slot and, where they are half of masters, its parameters behind."""

    def __init__(self, scalars: Scalars) -> None:
        self._scalars = scalars

    def state(self, layout: StateLayout) -> RecordName:
        return RecordName(0, f"state/{layout.subgroup.index}")

    def params(self, layout: StateLayout, segment: Segment) -> Place:
        before = (own for own in layout.subgroup.segments if own.start < segment.start)
        return self.state(layout), self.state_nbytes(layout) + sum(own.nbytes for own in before)

    def unit(self, unit: Unit) -> RecordName:
        return RecordName(0, f"param/{unit.index}")

    def buffers(self) -> RecordName:
        return RecordName(0, "buffers")

    def state_nbytes(self, layout: StateLayout) -> int:
        """Bytes of the slot that there are."""
        return layout.nbytes if self._scalars.has_state(layout) else layout.master_nbytes


@final
class TensorList:
    """The tensors that are listed, with the records in which their parts lie."""

    def __init__(self) -> None:
        self._numbers: dict[RecordName, int] = {}
        self._tensors: dict[str, tuple[TensorEntry, list[Part]]] = {}

    def add(self, key: str, entry: TensorEntry, start: int, stop: int, *places: Place) -> None:
        """Add elements [start, stop) of a tensor, one place for each source of its form."""
        sources = tuple([Source(self._numbers.setdefault(name, len(self._numbers)), offset) for name, offset in places])
        if key not in self._tensors:
            self._tensors[key] = entry, []
        self._tensors[key][1].append(Part(start, stop, sources))

    def add_empty(self, key: str, entry: TensorEntry) -> None:
        """Add a tensor without elements, which is in no record: it has its name, shape and dtype."""
        self._tensors[key] = entry, []

    @property
    def records(self) -> list[RecordName]:
        return list(self._numbers)

    def tensors(self) -> dict[str, TensorEntry]:
        return {key: entry.with_parts(sorted(parts)) for key, (entry, parts) in self._tensors.items()}


def list_tensors(
    state: RunState,
    places: RecordPlaces,
    scalars: Scalars,
    buffers: Iterable[tuple[str, torch.Tensor]],
    *,
    with_frozen: bool = True,
) -> TensorList:
    """List everything that this rank saves of a run. `buffers`: by name, if this rank saves them. Any thread."""
    found = TensorList()
    for layout in state.own_layouts:
        _list_subgroup(found, state, places, scalars, layout)
    for unit in state.saved_units(with_frozen):
        home, record = state.inventory.find(unit, "param"), places.unit(unit)
        here = slice(0, unit.numel) if home is None else home.elements(unit)
        for entry in unit.entries:
            low, high, spec = max(entry.start, here.start), min(entry.stop, here.stop), entry.param
            if low < high:
                place = record, (low - here.start) * unit.itemsize
                described = describe(unit.dtype, spec.shape, spec.order)
                found.add(param_key(spec), described, low - entry.start, high - entry.start, place)
    named = list(buffers)
    for name, buffer, offset in pack(named):
        described = describe(buffer.dtype, buffer.shape)
        found.add(buffer_key(name), described, 0, buffer.numel(), (places.buffers(), offset))
    for name, buffer in named:
        if not buffer.numel():
            found.add_empty(buffer_key(name), describe(buffer.dtype, buffer.shape))
    for spec in state.specs if state.runtime.collectives.rank == 0 else ():
        if not spec.numel and (with_frozen or spec.trainable):
            found.add_empty(param_key(spec), describe(spec.dtype, spec.shape))
    return found


def _list_subgroup(
    found: TensorList, state: RunState, places: RecordPlaces, scalars: Scalars, layout: StateLayout
) -> None:
    record, joined = places.state(layout), layout.masters.needs_params
    for segment in layout.subgroup.segments:
        for entry, low, high in segment.entries():
            start, stop, spec = low - entry.start, high - entry.start, entry.param
            before = low - segment.unit_start
            masters = [(record, first + before * dtype.itemsize) for first, _, dtype in layout.master_spans(segment)]
            if joined:
                params, first = places.params(layout, segment)
                masters.insert(1, (params, first + before * segment.unit.itemsize))
            if spec.name in state.trained:
                described = describe(torch.float32, spec.shape, spec.order)
                form = "joined" if joined else "plain"
                found.add(master_key(spec), described.model_copy(update={"form": form}), start, stop, *masters)
            else:
                described = describe(segment.unit.dtype, spec.shape, spec.order)
                form, source = ("plain", masters[1]) if joined else ("rounded", masters[0])
                found.add(param_key(spec), described.model_copy(update={"form": form}), start, stop, source)
    rule = state.view.rule
    for piece in scalars.stepped(layout):
        for array in layout.arrays_for(piece):
            field = array.field
            form = "magnitude" if joined and field.name == rule.unsigned_field else "plain"
            described = field_spec(piece.param, field, rule.elementwise).model_copy(update={"form": form})
            start, stop = field_range(piece, field, rule.elementwise)
            first = piece.start // field.block_numel if array.piece is None else 0
            place = record, array.offset + first * field.dtype.itemsize
            found.add(f"{field.name}/{piece.param.name}", described, start, stop, place)


def pack(buffers: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Lay buffers one after another in their record: each with its first byte."""
    position = 0
    for name, buffer in buffers:
        if not buffer.numel():
            continue
        yield name, buffer, position
        position = align_up(position + buffer.numel() * buffer.dtype.itemsize, PACKED_ALIGNMENT_NBYTES)
