"""Cut a rank's shards into sub-groups: the parts that the optimizer reads, updates and writes at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from tiered_zero.layout.flat import CUT_NUMEL, FlatEntry, Memory, ParamSpec, Unit
from tiered_zero.sizes import align_up

AUTO_SUB_GROUP_NUMEL = 1 << 20
"""The automatic size of a sub-group, in elements: 12 MiB of fp32 Adam state. With 48 MiB, and three sub-groups in
flight, a step took a tenth longer."""

MAX_SUB_GROUP_NUMEL = 1 << 22
"""A sub_group_size above this means the automatic size. Most configs have DeepSpeed's default, 1e9. With 1e9 a small
model would be a single sub-group, and no transfer could run during the update."""

QUANTIZED_BLOCK_NUMEL = 32
"""Elements of a block. The 8-bit moments of one block share a scale. In a sub-group every parameter starts a new block,
whatever its dtype."""


SHARED_CORES_SUB_GROUP_NUMEL = 1 << 22
"""The automatic size of a sub-group, in elements, if state rests in memory and the CPU also computes forward and
backward. Fewer sub-groups need fewer calls: with 23 sub-groups of gpt2-124m instead of 119, a step took 4% less CPU
time."""

IN_PLACE_SUB_GROUP_NUMEL = 1 << 25
"""The largest automatic size of a sub-group, in elements, if state rests in memory and an accelerator computes. Each
sub-group costs 0.2 to 0.6 ms between two kernel calls. With AUTO_SUB_GROUP_NUMEL this cost is 1.2 s per step for 7
billion parameters."""

LEAST_SUB_GROUPS = 64
"""The number of sub-groups that the automatic size aims at if state rests in memory and an accelerator computes. Small
models get fewer sub-groups, very large models more. With 64 sub-groups, a unit waits for only a small part of the
update."""

MAX_SUB_GROUPS = 1024
"""The most sub-groups of a model with less than a billion elements. A sub_group_size that would make more is increased.
For example, 100 is harmless in DeepSpeed, but here it cut 172 million elements into 84,000 sub-groups."""


def sub_group_numel(given: int, units: Iterable[Unit], *, in_memory: bool = False, shares_cores: bool = False) -> int:
    """Return the most elements of a sub-group of `units`. `given`: zero_optimization.sub_group_size; a value above
    MAX_SUB_GROUP_NUMEL stands for the automatic size. `in_memory`: whether all state rests in one tier
    other than nvme. `shares_cores`: whether the CPU also computes forward and backward."""
    total = sum(unit.numel for unit in units if unit.trainable)
    if given <= MAX_SUB_GROUP_NUMEL:
        return max(given, align_up(min(AUTO_SUB_GROUP_NUMEL, total // MAX_SUB_GROUPS), CUT_NUMEL))
    if not in_memory:
        return AUTO_SUB_GROUP_NUMEL
    if shares_cores:
        return SHARED_CORES_SUB_GROUP_NUMEL
    return max(AUTO_SUB_GROUP_NUMEL, align_up(min(IN_PLACE_SUB_GROUP_NUMEL, total // LEAST_SUB_GROUPS), CUT_NUMEL))


@dataclass(frozen=True, kw_only=True)
class ParamPiece:
    """The part of one parameter in a sub-group. `index`: its position among the sub-group's pieces. `start`: the
    position of its first element in the sub-group. `param_start`: the position of this element in the parameter.
    `group`: index of the param group."""

    index: int
    param: ParamSpec
    group: int
    start: int
    param_start: int
    numel: int

    @cached_property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A range of one unit in a sub-group. `unit_start`: the position of its first element in the unit's flat. `start`:
    the position of this element in the sub-group. `pieces`: the parts of parameters in the segment. All other elements
    are padding (zeros), or belong to parameters that no param group holds."""

    unit: Unit
    unit_start: int
    start: int
    numel: int
    pieces: tuple[ParamPiece, ...]

    @cached_property
    def stop(self) -> int:
        return self.start + self.numel

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the elements in the unit's dtype."""
        return self.numel * self.unit.itemsize

    def entries(self) -> Iterator[tuple[FlatEntry, int, int]]:
        """Yield each parameter that has elements in the segment, and the range [first, stop) of these elements in the
        unit's flat."""
        for entry in self.unit.entries:
            first, stop = max(entry.start, self.unit_start), min(entry.stop, self.unit_start + self.numel)
            if first < stop:
                yield entry, first, stop

    def part_of(self, flat: Memory) -> Memory:
        """Return the segment's part, [numel], of `flat`. `flat`: the unit's flat, in any dtype."""
        if not self.unit_start and self.numel == self.unit.numel:
            return flat  # saves a slice: a microsecond each, for thousands of parameters
        return cast("Memory", cast("Any", flat)[self.unit_start : self.unit_start + self.numel])


@dataclass(frozen=True, kw_only=True, eq=False)
class SubGroup:
    """Segments that the optimizer steps at once. A sub-group equals only itself, so it can be a key. `embedding`:
    whether the sub-group has embeddings that are kept apart (see `apart` of `cut_subgroups`)."""

    index: int
    segments: tuple[Segment, ...]
    embedding: bool = False

    @cached_property
    def numel(self) -> int:
        return align_up(self.segments[-1].stop, CUT_NUMEL) if self.segments else 0

    @cached_property
    def parts(self) -> dict[int, int]:
        """Unit index -> the number of the unit's elements in the sub-group."""
        return {segment.unit.index: segment.numel for segment in self.segments}

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units with elements in the sub-group, each once."""
        return tuple(dict.fromkeys(segment.unit for segment in self.segments))

    @cached_property
    def pieces(self) -> tuple[ParamPiece, ...]:
        return tuple(piece for segment in self.segments for piece in segment.pieces)


def cut_subgroups(
    units: Sequence[Unit],
    group_of: Mapping[str, int],
    size_numel: int,
    *,
    elementwise: bool,
    apart: bool = False,
    rank: int | None = 0,
) -> list[SubGroup]:
    """Cut `rank`'s shards of trainable units into sub-groups of at most `size_numel` elements, rounded up to whole
    pages. `rank` None: cut whole units.

    `group_of`: parameter name -> index of its param group; other parameters are not stepped. `elementwise`: whether a
    sub-group may end inside a parameter; if not, it ends between units, and a unit above the limit is one sub-group.
    `apart`: whether embeddings get sub-groups of their own. Such a sub-group also has the elements that share a page
    (or, if not `elementwise`, a unit) with an embedding.
    """
    runs = (
        (unit, *run)
        for unit in units
        if unit.trainable and any(entry.param.name in group_of for entry in unit.entries)
        for run in _runs(
            unit, range(unit.numel) if rank is None else unit.shard(rank), group_of if apart else {}, elementwise
        )
    )
    return _cut(runs, group_of, size_numel, elementwise=elementwise)


def pack_params(
    params: Sequence[tuple[ParamSpec, int]], size_numel: int, *, elementwise: bool, first_index: int = 0
) -> list[SubGroup]:
    """Cut parameters that belong to no unit into sub-groups of at most `size_numel` elements, rounded up to whole
    pages. `params`: (parameter, index of its param group). `elementwise`: whether a parameter may be cut; if not, a
    larger one is a sub-group of its own. `first_index`: the index of the first sub-group."""
    runs = []
    for param, _ in params:
        unit = Unit(
            index=param.index,
            name=param.name,
            module="",
            dtype=param.dtype,
            trainable=False,  # its gradient belongs to the user
            persistent=False,
            entries=(FlatEntry(param, 0),),
            bounds=(0, param.numel),
        )
        runs.append((unit, 0, param.numel, False))
    group_of = {param.name: group for param, group in params}
    return _cut(runs, group_of, size_numel, elementwise=elementwise, first_index=first_index)


def _cut(
    runs: Iterable[tuple[Unit, int, int, bool]],
    group_of: Mapping[str, int],
    size_numel: int,
    *,
    elementwise: bool,
    first_index: int = 0,
) -> list[SubGroup]:
    """Place ranges of units one after another, and cut them into sub-groups. `runs`: (unit, start, stop, holds
    embeddings) of each range."""
    limit = max(CUT_NUMEL, align_up(size_numel, CUT_NUMEL))
    subgroups: list[SubGroup] = []
    segments: list[Segment] = []
    filled = num_pieces = 0
    kind = False

    def close() -> None:
        nonlocal filled, num_pieces
        if segments:
            index = first_index + len(subgroups)
            subgroups.append(SubGroup(index=index, segments=tuple(segments), embedding=kind))
        segments.clear()
        filled = num_pieces = 0

    for unit, start, stop, embedding in runs:
        if embedding != kind or (not elementwise and filled + stop - start > limit):
            close()
        kind = embedding
        while start < stop:
            numel = min(limit - filled, stop - start) if elementwise else stop - start
            pieces = _pieces(unit, range(start, start + numel), group_of, filled, num_pieces)
            segments.append(Segment(unit=unit, unit_start=start, start=filled, numel=numel, pieces=pieces))
            num_pieces += len(pieces)
            filled = align_up(filled + numel, QUANTIZED_BLOCK_NUMEL)
            start += numel
            if filled >= limit:
                close()
    close()
    return subgroups


def _runs(unit: Unit, shard: range, group_of: Mapping[str, int], elementwise: bool) -> list[tuple[int, int, bool]]:
    """Divide a shard into parts with embeddings and parts without, cut at page boundaries. Return (start, stop, holds
    embeddings) for each part. If not `elementwise`, do not cut the shard. An embedding without a param group in
    `group_of` counts as another parameter."""
    embeddings = [
        (max(entry.start, shard.start), min(entry.stop, shard.stop))
        for entry in unit.entries
        if entry.param.embedding and entry.param.name in group_of
    ]
    embeddings = [(start, stop) for start, stop in embeddings if start < stop]
    if not elementwise or not embeddings:
        return [(shard.start, shard.stop, bool(embeddings))] if shard else []
    parts: list[tuple[int, int, bool]] = []
    position = shard.start
    for start, stop in embeddings:
        start, stop = start // CUT_NUMEL * CUT_NUMEL, align_up(stop, CUT_NUMEL)
        if parts and start <= position:
            parts[-1] = (parts[-1][0], stop, True)
        else:
            parts += [(position, start, False), (start, stop, True)]
        position = stop
    return [part for part in [*parts, (position, shard.stop, False)] if part[0] < part[1]]


def _pieces(
    unit: Unit, elements: range, group_of: Mapping[str, int], segment_start: int, first_index: int
) -> tuple[ParamPiece, ...]:
    pieces: list[ParamPiece] = []
    for entry in unit.entries:
        first, stop = max(entry.start, elements.start), min(entry.stop, elements.stop)
        if first < stop and entry.param.name in group_of:
            pieces.append(
                ParamPiece(
                    index=first_index + len(pieces),
                    param=entry.param,
                    group=group_of[entry.param.name],
                    start=segment_start + first - elements.start,
                    param_start=first - entry.start,
                    numel=stop - first,
                )
            )
    return tuple(pieces)
