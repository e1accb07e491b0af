"""Cut a rank's shards into sub-groups: what the optimizer reads, updates and writes at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.swap_bytes import cut_flats


@dataclass(frozen=True)
class ParamPiece:
    """The part of one parameter that lies in a sub-group.

    `index`: its place among the sub-group's pieces. `start`: first element in the sub-group; `param_start`: in the
    parameter; `group`: index of the optimizer's param group.
    """

    index: int
    param: ParamSpec
    group: int
    start: int
    param_start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Segment:
    """A stretch of one unit inside a sub-group. `unit_start`: first element in the unit's flat; `start`: in the
    sub-group.

    What no piece covers is padding (zeros), or parameters that no param group holds.
    """

    unit: Unit
    unit_start: int
    start: int
    numel: int
    pieces: tuple[ParamPiece, ...]

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class SubGroup:
    """`numel`: elements with padding, a multiple of a page in any dtype. `embedding`: of embeddings, cut apart."""

    index: int
    segments: tuple[Segment, ...]
    embedding: bool = False

    @cached_property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def parts(self) -> dict[int, int]:
        """Unit index -> elements of it."""
        return {segment.unit.index: segment.numel for segment in self.segments}

    @cached_property
    def pieces(self) -> tuple[ParamPiece, ...]:
        return tuple(piece for segment in self.segments for piece in segment.pieces)


def cut_subgroups(
    units: list[Unit], group_of: dict[str, int], size_numel: int, elementwise: bool, apart: bool = False
) -> list[SubGroup]:
    """Sub-groups of at most `size_numel` elements (rounded up to a page's worth) over trainable units that have a param
    group.

    `group_of`: parameter name -> param group; parameters that no group holds are not stepped. An elementwise rule may
    be cut inside a parameter; for any other rule cuts fall between units only, so a unit larger than the size is a
    sub-group alone. `apart`: embeddings get sub-groups of their own, see `cut_flats`.
    """
    stepped = [u for u in units if u.trainable and any(entry.param.name in group_of for entry in u.entries)]
    flats = [
        (unit.numel, [(e.start, e.stop) for e in unit.entries if _is_stepped_embedding(e.param, group_of)])
        for unit in stepped
    ]
    subgroups: list[SubGroup] = []
    for cut in cut_flats(flats, size_numel, elementwise, apart):
        segments: list[Segment] = []
        num_pieces = filled = 0
        for index, start, numel in cut.stretches:
            bare = Segment(stepped[index], start, filled, numel, ())
            segments.append(replace(bare, pieces=_pieces(bare, group_of, num_pieces)))
            num_pieces += len(segments[-1].pieces)
            filled += numel
        subgroups.append(SubGroup(len(subgroups), tuple(segments), cut.embedding))
    return subgroups


def _is_stepped_embedding(param: ParamSpec, group_of: dict[str, int]) -> bool:
    return param.embedding and param.numel > 0 and param.name in group_of


def _pieces(segment: Segment, group_of: dict[str, int], first_index: int) -> tuple[ParamPiece, ...]:
    pieces: list[ParamPiece] = []
    for entry in segment.unit.entries:
        first = max(entry.start, segment.unit_start)
        stop = min(entry.stop, segment.unit_start + segment.numel)
        if first < stop and entry.param.name in group_of:
            index, start = first_index + len(pieces), segment.start + first - segment.unit_start
            group = group_of[entry.param.name]
            pieces.append(ParamPiece(index, entry.param, group, start, first - entry.start, stop - first))
    return tuple(pieces)
