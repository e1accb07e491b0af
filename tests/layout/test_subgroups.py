"""Sub-groups: the pieces tile every stepped parameter exactly, and every cut can be written by every tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.inspection.insides import planning_notices, specify_run
from tests.support.units import make_unit
from tiered_zero.config.load import load
from tiered_zero.layout.flat import CUT_NUMEL, Unit, equal_bounds
from tiered_zero.layout.subgroups import cut_subgroups, sub_group_numel
from tiered_zero.sizes import PAGE_NBYTES


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Unit], dict[str, int]]:
    """Units of one to four parameters, some frozen; parameters in one of three groups or in none."""
    units, group_of = [], {}
    for index in range(draw(st.integers(1, 6))):
        numels = draw(st.lists(st.integers(0, 9000), min_size=1, max_size=4).filter(any))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
        unit = make_unit(index, numels, dtype, trainable=draw(st.booleans()))
        units.append(unit)
        for entry in unit.entries:
            group = draw(st.sampled_from([0, 1, 2, None]))
            if group is not None:
                group_of[entry.param.name] = group
    return units, group_of


@given(layout=layouts(), size_numel=st.integers(1, 30_000), elementwise=st.booleans())
def test_pieces_tile_every_stepped_parameter_once(
    layout: tuple[list[Unit], dict[str, int]], size_numel: int, elementwise: bool
) -> None:
    units, group_of = layout
    found: dict[str, list[tuple[int, int]]] = {}
    for subgroup in cut_subgroups(units, group_of, size_numel, elementwise=elementwise):
        for piece in subgroup.pieces:
            assert piece.group == group_of[piece.param.name]
            assert 0 <= piece.start < piece.stop <= subgroup.numel
            found.setdefault(piece.param.name, []).append((piece.param_start, piece.param_start + piece.numel))
    stepped = {
        entry.param.name: entry.param.numel
        for unit in units
        if unit.trainable
        for entry in unit.entries
        if entry.param.name in group_of and entry.param.numel
    }
    assert found.keys() == stepped.keys()
    for name, parts in found.items():
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])], "in order, no gap, no overlap"
        assert parts[-1][1] == stepped[name]
        assert elementwise or len(parts) == 1, "a rule that needs whole parameters gets them whole"


@given(layout=layouts(), size_numel=st.integers(1, 30_000), elementwise=st.booleans())
def test_segments_tile_the_units_and_cuts_are_pages_in_any_dtype(
    layout: tuple[list[Unit], dict[str, int]], size_numel: int, elementwise: bool
) -> None:
    units, group_of = layout
    subgroups = cut_subgroups(units, group_of, size_numel, elementwise=elementwise)
    assert [subgroup.index for subgroup in subgroups] == list(range(len(subgroups)))
    covered: dict[int, int] = {}
    order = []
    for subgroup in subgroups:
        position = 0
        for segment in subgroup.segments:
            assert segment.start == position
            assert segment.unit_start == covered.get(segment.unit.index, 0)
            for nbytes in (segment.unit_start, segment.start, segment.numel):
                assert nbytes * 2 % PAGE_NBYTES == 0, "a page in 16 bit, so in every trainable dtype"
            position = segment.stop
            covered[segment.unit.index] = segment.unit_start + segment.numel
            order.append(segment.unit.index)
        assert subgroup.numel == position
        assert [piece.index for piece in subgroup.pieces] == list(range(len(subgroup.pieces)))
    wanted = [u for u in units if u.trainable and any(entry.param.name in group_of for entry in u.entries)]
    assert covered == {unit.index: unit.numel for unit in wanted}
    assert order == sorted(order), "in the order of the units"


@given(layout=layouts(), size_numel=st.integers(1, 30_000))
def test_sizes_are_kept(layout: tuple[list[Unit], dict[str, int]], size_numel: int) -> None:
    units, group_of = layout
    limit = -(-size_numel // CUT_NUMEL) * CUT_NUMEL
    cut = cut_subgroups(units, group_of, size_numel, elementwise=True)
    assert all(subgroup.numel == limit for subgroup in cut[:-1]), (
        "an elementwise rule fills every sub-group but the last"
    )
    assert all(subgroup.numel <= limit for subgroup in cut)
    for subgroup in cut_subgroups(units, group_of, size_numel, elementwise=False):
        assert subgroup.numel <= limit or len(subgroup.segments) == 1, "only a unit that is larger stands alone"


@given(layout=layouts(), size_numel=st.integers(1, 30_000), world_size=st.integers(1, 4), apart=st.booleans())
def test_the_ranks_shards_tile_every_stepped_parameter(
    layout: tuple[list[Unit], dict[str, int]], size_numel: int, world_size: int, apart: bool
) -> None:
    units, group_of = layout
    sharded = [
        replace(unit, bounds=equal_bounds(unit.entries[-1].stop, unit.dtype.itemsize, world_size)) for unit in units
    ]
    found: dict[str, list[range]] = {}
    for rank in range(world_size):
        for subgroup in cut_subgroups(sharded, group_of, size_numel, elementwise=True, apart=apart, rank=rank):
            for segment in subgroup.segments:
                shard = segment.unit.shard(rank)
                assert shard.start <= segment.unit_start < segment.unit_start + segment.numel <= shard.stop
            for piece in subgroup.pieces:
                found.setdefault(piece.param.name, []).append(range(piece.param_start, piece.param_start + piece.numel))
    for unit in units if group_of else ():
        for param in (entry.param for entry in unit.entries if unit.trainable and entry.param.name in group_of):
            parts = sorted(found.get(param.name, []), key=lambda part: part.start)
            assert [index for part in parts for index in part] == list(range(param.numel))


def test_piece_starts_match_the_flat() -> None:
    """Element k of a parameter is where the unit's flat has it, seen through segment and piece alike."""
    unit = make_unit(0, [3000, 5000, 100])
    starts = {entry.param.name: entry.start for entry in unit.entries}
    for subgroup in cut_subgroups([unit], dict.fromkeys(starts, 0), CUT_NUMEL, elementwise=True):
        for segment in subgroup.segments:
            for piece in segment.pieces:
                in_unit = segment.unit_start + piece.start - segment.start
                flat = torch.arange(unit.numel)
                assert segment.part_of(flat)[piece.start - segment.start] == in_unit
                assert in_unit == starts[piece.param.name] + piece.param_start


@st.composite
def with_embeddings(draw: st.DrawFn) -> tuple[list[Unit], dict[str, int]]:
    """The same, with some parameters as embeddings."""
    units, group_of = draw(layouts())
    marked = [
        replace(
            unit,
            entries=tuple(replace(e, param=replace(e.param, embedding=draw(st.booleans()))) for e in unit.entries),
        )
        for unit in units
    ]
    return marked, group_of


@given(layout=with_embeddings(), size_numel=st.integers(1, 30_000), elementwise=st.booleans())
def test_embeddings_are_cut_apart_but_for_their_pages(
    layout: tuple[list[Unit], dict[str, int]], size_numel: int, elementwise: bool
) -> None:
    units, group_of = layout
    together = cut_subgroups(units, group_of, size_numel, elementwise=elementwise)
    cut = cut_subgroups(units, group_of, size_numel, elementwise=elementwise, apart=True)
    assert sum(subgroup.numel for subgroup in cut) == sum(subgroup.numel for subgroup in together)
    assert not any(subgroup.embedding for subgroup in together)
    limit = -(-size_numel // CUT_NUMEL) * CUT_NUMEL
    assert all(subgroup.numel <= limit or not elementwise for subgroup in cut)
    for subgroup in cut:
        assert subgroup.embedding == any(piece.param.embedding for piece in subgroup.pieces)
        assert len({segment.unit.index for segment in subgroup.segments}) == len(subgroup.segments), (
            "no cut for nothing"
        )
        if subgroup.embedding and elementwise:
            for piece in subgroup.pieces:
                pages = {place // CUT_NUMEL for place in (piece.start, piece.stop - 1)}
                near = {
                    page
                    for other in subgroup.pieces
                    if other.param.embedding
                    for page in range(other.start // CUT_NUMEL, (other.stop - 1) // CUT_NUMEL + 1)
                }
                assert pages <= near, f"{piece.param.name} has pages of its own among embeddings"


@given(layout=with_embeddings(), size_numel=st.integers(1, 30_000), elementwise=st.booleans())
def test_pieces_tile_parameters_also_where_embeddings_are_apart(
    layout: tuple[list[Unit], dict[str, int]], size_numel: int, elementwise: bool
) -> None:
    units, group_of = layout

    def parts(apart: bool) -> dict[str, int]:
        found: dict[str, int] = {}
        for subgroup in cut_subgroups(units, group_of, size_numel, elementwise=elementwise, apart=apart):
            for piece in subgroup.pieces:
                assert piece.param_start == found.get(piece.param.name, 0)
                found[piece.param.name] = piece.param_start + piece.numel
            assert [piece.index for piece in subgroup.pieces] == list(range(len(subgroup.pieces)))
            assert subgroup.parts == {segment.unit.index: segment.numel for segment in subgroup.segments}
        return found

    assert parts(True) == parts(False)


@pytest.mark.parametrize("elementwise", [True, False])
def test_nothing_to_step_gives_no_subgroups(elementwise: bool) -> None:
    assert cut_subgroups([], {}, 1000, elementwise=elementwise) == []
    assert cut_subgroups([make_unit(0, [10])], {}, 1000, elementwise=elementwise) == []
    assert cut_subgroups([make_unit(0, [10], trainable=False)], {"u0.p0": 0}, 1000, elementwise=elementwise) == []


@pytest.mark.parametrize(
    ("given_numel", "numel"),
    [(10**12, 1 << 22), (10**9, 1 << 22), (10**8, 1 << 22), (1 << 21, 1 << 21), (None, 1 << 22)],
)
def test_a_limit_that_would_leave_nothing_to_overlap(given_numel: int | None, numel: int) -> None:
    """DeepSpeed's 1e9 stands in most configs; a model of a few million elements is cut nevertheless, and it is said."""
    zero = {} if given_numel is None else {"sub_group_size": given_numel}
    config = load({"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero})
    run_spec = specify_run(config, nn.Linear(3000, 3000, device="meta"))
    sizes = [layout.subgroup.numel for layout in run_spec.layouts]
    assert max(sizes) == numel and len(sizes) > 1
    notices = [line.partition(": ")[2] for line in planning_notices(run_spec)]
    said = f"{given_numel} is a limit; sub-groups are cut at {numel} elements, the automatic size"
    assert [line.partition(" (")[0] for line in notices] == ([said] if given_numel == 10**8 else [])


def test_state_that_is_updated_where_it_rests_is_cut_into_fewer_pieces() -> None:
    def numel(total: int, **how: bool) -> int:
        return sub_group_numel(10**9, [make_unit(0, [total])], **how)

    assert numel(7 * 10**9, in_memory=True) == 1 << 25 and numel(7 * 10**9) == 1 << 20
    assert 124_000_000 / 66 < numel(124_000_000, in_memory=True) < 124_000_000 / 60, "units wait for their own updates"
    assert numel(5_000_000, in_memory=True) == numel(5_000_000) == 1 << 20
    assert numel(5_000_000, in_memory=True, shares_cores=True) == 1 << 22
    assert numel(5_000_000, shares_cores=True) == 1 << 20, "NVMe: many in flight"


@pytest.mark.parametrize(("given_numel", "numel"), [(100, 10240), (10240, 10240), (20000, 20480)])
def test_a_size_far_below_a_parameter_has_a_floor(given_numel: int, numel: int) -> None:
    """Each sub-group is a job of its own: 100 elements were 4,396 of them."""
    zero = {"sub_group_size": given_numel}
    config = load({"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero})
    run_spec = specify_run(config, nn.Linear(3000, 3000, device="meta"))
    assert {layout.subgroup.numel for layout in run_spec.layouts[:-1]} == {numel}
    assert len(run_spec.layouts) <= 1024
    expected = ["100 would cut this model into more than 1024 pieces; sub-groups are cut at 10240 elements"]
    notices = [line.partition("sub_group_size: ")[2] for line in planning_notices(run_spec)]
    assert notices == (expected if given_numel == 100 else [])
