"""Layout of master weights and optimizer state inside a sub-group's slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered_zero.layout.subgroups import ParamPiece, Segment, SubGroup
from tiered_zero.rules.rule import StateField, UpdateRule
from tiered_zero.rules.state_formats import FullMasters, MasterFormat
from tiered_zero.sizes import PAGE_NBYTES, align_up


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """`piece`: index of the piece that it belongs to; None for an array over the whole sub-group. `offset`: bytes."""

    field: StateField
    piece: int | None
    offset: int


class StateLayout:
    """The slot of a sub-group: masters [numel], then each state array, every one at a page's start.

    `masters`: how they rest. If that takes a state array besides, it is the first after them, and `master_nbytes`
    counts both. `state_start`: the first byte of the state arrays. `initial_nbytes`: what a slot holds from the start.

    For an elementwise rule each array spans the sub-group, so that a run is a slice of it; a field that only some param
    groups have exists for all. For any other rule each piece (a whole parameter) has its own arrays.
    """

    def __init__(
        self,
        subgroup: SubGroup,
        rule: UpdateRule,
        groups: Sequence[Mapping[str, Any]],
        masters: MasterFormat | None = None,
    ) -> None:
        self.subgroup = subgroup
        self.masters = masters or FullMasters()
        self.master_nbytes = sum(dtype.itemsize for dtype in self.masters.dtypes) * subgroup.numel
        self.arrays: list[StateArray] = []
        self._arrays_of: defaultdict[int | None, list[StateArray]] = defaultdict(list)
        self._shared_of_group: dict[int, list[StateArray]] = {}
        self.initial_nbytes = 0 if self.masters.follows_params else self.master_nbytes
        self._end = self.state_start = sum(dtype.itemsize for dtype in self.masters.dtypes[:1]) * subgroup.numel
        if rule.elementwise:
            merged: dict[str, StateField] = {}
            held = {piece.group for piece in subgroup.pieces}
            names: dict[int, set[str]] = {}
            # padding alone, as the last rank has of a small unit, still has masters in each of their arrays
            for group in sorted(held or range(len(self.masters.dtypes) - 1)):
                fields = rule.state_fields((subgroup.numel,), groups[group])
                names[group] = {field.name for field in fields}
                merged.update({field.name: field for field in fields})
            for field in sorted(merged.values(), key=lambda field: field.name != rule.unsigned_field):
                self._append(field, None)
            for group, own in names.items():
                self._shared_of_group[group] = [array for array in self.arrays if array.field.name in own]
        else:
            for index, piece in enumerate(subgroup.pieces):
                for field in rule.state_fields(piece.param.shape, groups[piece.group]):
                    self._append(field, index)
        self.nbytes = self._end

    @property
    def has_own_masters(self) -> bool:
        """Whether masters follow their parameters and rest beside the state: nothing else saves them."""
        return self.masters.follows_params and bool(self.masters.dtypes)

    def _append(self, field: StateField, piece: int | None) -> None:
        array = StateArray(field=field, piece=piece, offset=self._end)
        self.arrays.append(array)
        self._arrays_of[piece].append(array)
        self._end += align_up(field.nbytes, PAGE_NBYTES)

    def master(self, raw: torch.Tensor) -> torch.Tensor:
        """View the masters in `raw`, the slot's bytes: [numel], `Run.master` of all its elements."""
        if not self.masters.dtypes:
            return raw[:0].view(torch.float32)
        dtype = self.masters.dtypes[0]
        return raw[: dtype.itemsize * self.subgroup.numel].view(dtype)

    def initialize(self, raw: torch.Tensor) -> None:
        """Fill a slot that was not stepped: state with zeros; masters that follow their parameters with NaN, which
        differs from every parameter, so that the next update takes them over."""
        if self.masters.follows_params:
            self.master(raw).fill_(float("nan"))
        raw[self.master_nbytes :].zero_()

    def master_spans(self, segment: Segment) -> list[tuple[int, int, torch.dtype]]:
        """Locate a segment's masters: (first byte in the slot, bytes, dtype) of each of the format's arrays."""
        spans, start = [], 0
        for dtype in self.masters.dtypes:
            spans.append((start + dtype.itemsize * segment.start, dtype.itemsize * segment.numel, dtype))
            start += dtype.itemsize * self.subgroup.numel
        return spans

    def master_parts(self, raw: torch.Tensor, segment: Segment) -> list[torch.Tensor]:
        """View a segment's masters in `raw`, as their format has them."""
        return [raw[start : start + nbytes].view(dtype) for start, nbytes, dtype in self.master_spans(segment)]

    def clear(self, raw: torch.Tensor, kept: Iterable[ParamPiece]) -> None:
        """Set the state in `raw` to zero, but for the arrays of the pieces `kept`, which are filled next."""
        filled = []
        for piece in kept:
            for array in self.arrays_for(piece):
                start, stop = array.offset, array.offset + array.field.nbytes
                if array.piece is None:
                    itemsize, block = array.field.dtype.itemsize, array.field.block_numel
                    start, stop = start + piece.start // block * itemsize, start + -(-piece.stop // block) * itemsize
                filled.append((start, stop))
        for start, stop in gaps(sorted(filled), self.state_start, self.nbytes):
            raw[start:stop].zero_()

    def spans(self, part: SubGroup) -> list[tuple[int, int]]:
        """Locate masters and state of some segments: (first byte in the slot, last + 1), whole pages, disjoint, in
        order."""
        spans: list[tuple[int, int]] = []
        for segment in part.segments:
            spans += [(start, start + nbytes) for start, nbytes, _ in self.master_spans(segment)]
            for array in self._arrays_of[None]:
                elements = _part(array.field, segment.start, segment.stop)
                itemsize = array.field.dtype.itemsize
                spans.append((array.offset + elements.start * itemsize, array.offset + elements.stop * itemsize))
            for piece in segment.pieces:
                spans += [(array.offset, array.offset + array.field.nbytes) for array in self._arrays_of[piece.index]]
        merged: list[tuple[int, int]] = []
        for start, stop in sorted((start - start % PAGE_NBYTES, align_up(stop, PAGE_NBYTES)) for start, stop in spans):
            first, last = merged.pop() if merged and start <= merged[-1][1] else (start, stop)
            merged.append((first, max(last, stop)))
        return merged

    def marks(self, raw: torch.Tensor) -> torch.Tensor | None:
        """View the state array whose signs belong to the masters, [numel]; None if no array has such signs."""
        return _view(raw, self.arrays[0]) if len(self.masters.dtypes) > 1 else None

    def views(self, raw: torch.Tensor) -> dict[int, torch.Tensor]:
        """View every state array, by its offset: once for the state of many pieces, for a view takes microseconds."""
        return {array.offset: _view(raw, array) for array in self.arrays}

    def state(
        self,
        raw: torch.Tensor,
        piece: ParamPiece,
        start: int,
        stop: int,
        views: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """View the state of elements [start, stop) of the sub-group (elementwise), or of `piece` in its own shapes.

        `views`: of all arrays in `raw`, where the caller has them."""
        state = {}
        for array in self.arrays_for(piece):
            view = _view(raw, array) if views is None else views[array.offset]
            is_shared = array.piece is None
            state[array.field.name] = (
                view[_part(array.field, start, stop)] if is_shared else _shaped(piece, array.field, view)
            )
        return state

    def fields(self, piece: ParamPiece) -> list[StateField]:
        """List the state arrays of a piece; one over the whole sub-group is of the sub-group's shape."""
        return [array.field for array in self.arrays_for(piece)]

    def arrays_for(self, piece: ParamPiece) -> list[StateArray]:
        """List the state arrays that hold a piece's state: over the whole sub-group, and its own."""
        return self._shared_of_group.get(piece.group, []) + self._arrays_of.get(piece.index, [])


def gaps(ranges: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """List what disjoint `ranges`, in order, leave of [first, last)."""
    found = []
    for start, stop in (*ranges, (last, last)):
        if first < start:
            found.append((first, start))
        first = stop
    return found


def _shaped(piece: ParamPiece, field: StateField, memory: torch.Tensor) -> torch.Tensor:
    """In the field's shape; one of the parameter's shape has its strides, as torch's zeros_like() gives them."""
    if field.stride is not None:
        return memory.as_strided(field.shape, field.stride)
    return piece.param.view(memory) if field.shape == piece.param.shape else memory.view(field.shape)


def _part(field: StateField, start: int, stop: int) -> slice:
    return slice(start // field.block_numel, -(-stop // field.block_numel))


def _view(raw: torch.Tensor, array: StateArray) -> torch.Tensor:
    """[n] of the field's dtype."""
    return raw[array.offset : array.offset + array.field.nbytes].view(array.field.dtype)
