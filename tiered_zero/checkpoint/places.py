"""Where an in-place commit holds the elements of each key of the portable form: in which records, as what.

A full checkpoint has files of its own; a commit leaves everything where it rests, and says which bytes of which record
are which elements. The forms:

    plain       one source: the elements themselves
    joined      masters that rest as remainders: sources are remainder (int16), parameter (bfloat16), and the second
                moment (fp32) whose sign is the mark
    magnitude   one source: that second moment, without its sign
    rounded     one source: fp32 masters of a parameter that no param group holds, which is what they round to
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, final

import torch

from tiered_zero.checkpoint.portable import RunState, buffer_key, master_key, memory_order, param_key
from tiered_zero.checkpoint.tag_manifest import TensorEntry
from tiered_zero.checkpoint.tensors import describe
from tiered_zero.errors import StoreError
from tiered_zero.layout.flat import PARAM_ALIGNMENT_NBYTES, FlatEntry, Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.sizes import align_up
from tiered_zero.store.checked_json import check_fields, check_integers, check_kind
from tiered_zero.tiers.inventory import Home

SOURCE_ITEMSIZES: Final = {"joined": (2, 2, 4), "rounded": (4,), "plain": (0,), "magnitude": (0,)}
"""Form -> bytes of an element in each source; 0: those of the key's own dtype."""


class Source(NamedTuple):
    """Byte `offset` of the record number `record`."""

    record: int
    offset: int


class PlacedPart(NamedTuple):
    """Elements [start, stop) of a key, in memory order, one source for each that the form has."""

    start: int
    stop: int
    sources: tuple[Source, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """Of one key. `parts`: in order, disjoint, covering it."""

    form: str
    parts: tuple[PlacedPart, ...]


class RecordName(NamedTuple):
    """A record `name` of the store number `store`: of the stores of all ranks, one rank behind the other; each has that
    of the state first, and then that of parameters where it is another."""

    store: int
    name: str


@final
@dataclass(kw_only=True)
class Places:
    """All keys of a commit."""

    records: list[RecordName] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """As JSON values."""
        keys = {
            key: [place.form, *([part.start, part.stop, *(n for s in part.sources for n in s)] for part in place.parts)]
            for key, place in self.places.items()
        }
        return {"records": [list(record) for record in self.records], "places": keys}

    @classmethod
    def from_body(cls, body: Any, covers: bool = True) -> Places:
        """Of JSON values that may be hostile. `covers`: parts lie one behind the other, as those of all ranks do.
        Raises ValueError."""
        fields = check_fields(body, {"records": list, "places": dict})
        records = []
        for item in fields["records"]:
            check_kind("records", item, list)
            if len(item) != 2 or type(item[0]) is not int or type(item[1]) is not str or item[0] < 0:
                raise ValueError("records: expected the number of a store and a name")
            records.append(RecordName(item[0], item[1]))
        places = {key: _place(key, item, len(records), covers) for key, item in fields["places"].items()}
        return cls(records=records, places=places)


def join_places(found: Sequence[tuple[Places, int]]) -> Places:
    """Those of all ranks, each with the number of its stores. Raises StoreError where they do not cover a key once."""
    if len(found) == 1:
        return found[0][0]
    joined, first_store = Places(), 0
    parts: dict[str, list[PlacedPart]] = {}
    forms: dict[str, str] = {}
    for own, num_stores in found:
        first = len(joined.records)
        joined.records += [RecordName(first_store + record.store, record.name) for record in own.records]
        first_store += num_stores
        for key, place in own.places.items():
            if forms.setdefault(key, place.form) != place.form:
                raise StoreError(f"{key} rests as {forms[key]} on one rank, and as {place.form} on another.")
            parts.setdefault(key, []).extend(
                part._replace(sources=tuple(Source(first + at.record, at.offset) for at in part.sources))
                for part in place.parts
            )
    for key, own_parts in parts.items():
        own_parts.sort()
        for before, after in pairwise(own_parts):
            if before.stop != after.start:
                raise StoreError(f"{key}: elements {before.stop} to {after.start} are missing or doubled.")
        joined.places[key] = Place(form=forms[key], parts=tuple(own_parts))
    return joined


def _place(key: str, item: Any, num_records: int, covers: bool) -> Place:
    check_kind("places", item, list)
    if not item or type(item[0]) is not str or item[0] not in SOURCE_ITEMSIZES:
        raise ValueError(f"places: {key[:200]!a}: expected one of {', '.join(SOURCE_ITEMSIZES)}")
    form, parts, end = item[0], [], 0
    num_sources = len(SOURCE_ITEMSIZES[form])
    for one in item[1:]:
        check_kind("places", one, list)
        check_integers("places", one)
        if len(one) != 2 + 2 * num_sources:
            raise ValueError(f"places: {key[:200]!a}: expected start, stop and {num_sources} sources of each part")
        start, stop, *numbers = one
        if (start != end if covers else start < end) or stop <= start:
            raise ValueError(f"places: {key[:200]!a}: elements {start} to {stop} are out of order")
        sources = tuple(Source(*numbers[at : at + 2]) for at in range(0, len(numbers), 2))
        if any(source.record >= num_records for source in sources):
            raise ValueError(f"places: {key[:200]!a}: there is no such record")
        parts.append(PlacedPart(start, stop, sources))
        end = stop
    return Place(form=form, parts=tuple(parts))


@final
class PlaceTable:
    """Lists the places of what this rank saves of a run. `copies`: unit index -> home of its durable copy; `buffers`:
    that of buffers. `tiers`: those of this rank's stores, in order. Any thread, while nothing is updated."""

    def __init__(
        self, state: RunState, tiers: Sequence[object], copies: Mapping[int, Home], buffers: Home | None
    ) -> None:
        self._state = state
        self._tiers = tiers
        self._copies = copies
        self._buffers = buffers

    def list(self, packed: Iterable[tuple[str, torch.Tensor, int]]) -> tuple[Places, dict[str, TensorEntry]]:
        """List everything, and describe it. `packed`: buffers with their names and first bytes in the record, where
        this rank saves them."""
        state = self._state
        numbers: dict[RecordName, int] = {}
        parts: dict[str, list[PlacedPart]] = {}
        forms: dict[str, str] = {}

        def source(home: Home, offset: int) -> Source:
            name = RecordName(self._tiers.index(home.tier), home.slot.name)
            return Source(numbers.setdefault(name, len(numbers)), offset)

        def add(key: str, form: str, start: int, stop: int, *sources: Source) -> None:
            forms[key] = form
            parts.setdefault(key, []).append(PlacedPart(start, stop, sources))

        specs = {**state.state_specs(state.is_stepped), **state.param_specs()}
        for layout in state.own_layouts:
            home = state.inventory.home(layout.subgroup, "state")
            joined = layout.masters.needs_params
            for segment, piece in _pieces(layout):
                stop = piece.param_start + piece.numel
                sources = [source(home, offset) for offset in _master_offsets(layout, segment, piece.start)]
                if joined:
                    params = self._copies.get(segment.unit.index) or state.inventory.home(segment.unit, "param")
                    before = (piece.start - segment.start) * segment.unit.itemsize
                    sources.insert(1, source(params, params.offset_of(segment) + before))
                add(master_key(piece.param), "joined" if joined else "plain", piece.param_start, stop, *sources)
            for array, own in state.array_ranges(layout, state.is_stepped):
                marked = joined and array.field.name == state.rule.unsigned_field
                at = source(home, array.offset + own.first * array.field.dtype.itemsize)
                add(own.key, "magnitude" if marked else "plain", own.start, own.stop, at)
        own_units = {unit.index for unit in state.own_units}
        for unit in state.units:
            durable = self._copies.get(unit.index)
            if durable is None and (unit.index not in state.updated_units or self._joins(unit)):
                durable = state.inventory.home(unit, "param")
            if durable is not None:
                for own in state.unmastered_ranges(unit) if unit.index in own_units else ():
                    add(own.key, "plain", own.start, own.stop, source(durable, own.first * unit.itemsize))
                continue
            for entry in state.unmastered(unit):
                key = param_key(entry.param)
                specs[key] = describe(unit.dtype, entry.param.shape, memory_order(entry.param))
                for layout, segment, low, high in self._overlaps(unit, entry):
                    (offset, *_) = _master_offsets(layout, segment, segment.start + low - segment.unit_start)
                    home = state.inventory.home(layout.subgroup, "state")
                    add(key, "rounded", low - entry.start, high - entry.start, source(home, offset))
        for name, buffer, offset in packed:
            key = buffer_key(name)
            specs[key] = describe(buffer.dtype, buffer.shape)
            assert self._buffers is not None, "buffers are planned with a record"
            add(key, "plain", 0, buffer.numel(), source(self._buffers, offset))
        places = {key: Place(form=forms[key], parts=tuple(sorted(parts[key]))) for key in forms}
        return Places(records=list(numbers), places=places), {key: specs[key] for key in places}

    def _joins(self, unit: Unit) -> bool:
        return any(
            layout.masters.needs_params
            for layout in self._state.layouts
            for segment in layout.subgroup.segments
            if segment.unit.index == unit.index
        )

    def _overlaps(self, unit: Unit, entry: FlatEntry) -> Iterator[tuple[StateLayout, Segment, int, int]]:
        """Yield the parts of sub-groups in which an entry lies: elements [low, high) of the unit's flat."""
        for layout in self._state.own_layouts:
            for segment in layout.subgroup.segments:
                if segment.unit.index == unit.index:
                    for own, low, high in segment.entries():
                        if own == entry:
                            yield layout, segment, low, high


def _pieces(layout: StateLayout) -> Iterator[tuple[Segment, ParamPiece]]:
    for segment in layout.subgroup.segments:
        for piece in segment.pieces:
            yield segment, piece


def _master_offsets(layout: StateLayout, segment: Segment, start: int) -> list[int]:
    """Bytes in the slot before element `start` of the sub-group, which the segment has, in each array of masters."""
    return [first + (start - segment.start) * dtype.itemsize for first, _, dtype in layout.master_spans(segment)]


def pack(buffers: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Lay buffers one after another in their record: each with its first byte."""
    position = 0
    for name, buffer in buffers:
        if not buffer.numel():
            continue
        yield name, buffer, position
        position = align_up(position + buffer.numel() * buffer.dtype.itemsize, PARAM_ALIGNMENT_NBYTES)
