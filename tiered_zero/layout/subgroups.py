"""Cut a rank's shards into sub-groups: what the optimizer reads, updates and writes at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.swap_bytes import CUT_NUMEL
from tiered_zero.sizes import align_up


@dataclass(frozen=True)
class Piece:
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
    pieces: tuple[Piece, ...]

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class SubGroup:
    """`numel`: elements with padding, a multiple of a page in any dtype."""

    index: int
    segments: tuple[Segment, ...]

    @cached_property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for segment in self.segments for piece in segment.pieces)


def cut_subgroups(units: list[Unit], group_of: dict[str, int], size_numel: int, elementwise: bool) -> list[SubGroup]:
    """Sub-groups of at most `size_numel` elements (rounded up to a page's worth) over trainable units that have a param
    group.

    `group_of`: parameter name -> param group; parameters that no group holds are not stepped. An elementwise rule may
    be cut inside a parameter; for any other rule cuts fall between units only, so a unit larger than the size is a
    sub-group alone.
    """
    limit = max(CUT_NUMEL, align_up(size_numel, CUT_NUMEL))
    subgroups: list[SubGroup] = []
    segments: list[Segment] = []
    filled = 0

    def close() -> None:
        nonlocal segments, filled
        if segments:
            subgroups.append(SubGroup(len(subgroups), tuple(segments)))
        segments, filled = [], 0

    for unit in units:
        if not unit.trainable or not any(entry.param.name in group_of for entry in unit.entries):
            continue
        position = 0
        if not elementwise and filled + unit.numel > limit:
            close()
        while position < unit.numel:
            numel = min(limit - filled if elementwise else unit.numel, unit.numel - position)
            first_index = sum(len(segment.pieces) for segment in segments)
            pieces = _pieces(Segment(unit, position, filled, numel, ()), group_of, first_index)
            segments.append(Segment(unit, position, filled, numel, pieces))
            filled += numel
            position += numel
            if filled >= limit:
                close()
    close()
    return subgroups


def _pieces(segment: Segment, group_of: dict[str, int], first_index: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for entry in segment.unit.entries:
        first = max(entry.start, segment.unit_start)
        stop = min(entry.stop, segment.unit_start + segment.numel)
        if first < stop and entry.param.name in group_of:
            index, start = first_index + len(pieces), segment.start + first - segment.unit_start
            group = group_of[entry.param.name]
            pieces.append(Piece(index, entry.param, group, start, first - entry.start, stop - first))
    return tuple(pieces)
