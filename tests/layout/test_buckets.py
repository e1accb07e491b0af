"""Buckets: every element of every shard once, in rows of one size, with borders that depend on sizes alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.units import make_unit
from tiered_zero.layout.buckets import SHARED_NUMEL, cut_buckets
from tiered_zero.layout.flat import Unit

SIZES = st.lists(st.lists(st.integers(1, 50_000), min_size=1, max_size=3), min_size=1, max_size=6)


def units_of(sizes: list[list[int]], world: int, dtypes: list[torch.dtype] | None = None) -> list[Unit]:
    kinds = dtypes or [torch.float32]
    return [make_unit(index, numels, kinds[index % len(kinds)], world_size=world) for index, numels in enumerate(sizes)]


@given(sizes=SIZES, world=st.sampled_from([1, 2, 3, 4]), limit=st.integers(1, 300_000), mixed=st.booleans())
def test_buckets_hold_every_element_once(sizes: list[list[int]], world: int, limit: int, mixed: bool) -> None:
    units = units_of(sizes, world, [torch.float32, torch.bfloat16] if mixed else None)
    limit = max(limit, 16 * world)  # a smaller one makes thousands
    limit = max(limit, sum(unit.numel for unit in units) // 200)
    buckets = cut_buckets(units, world, limit)
    found: dict[tuple[int, int], list[range]] = {}
    for bucket in buckets:
        assert len({part.unit.dtype for part in bucket.parts}) == 1
        assert {stop - start for start, stop in pairwise(bucket.bounds)} == {len(bucket.row(0))}
        assert bucket.numel <= max(limit, world)
        room_numel, row_numel = bucket.nbytes(1) - bucket.numel, len(bucket.row(0))
        assert row_numel <= room_numel <= max(row_numel, SHARED_NUMEL)
        assert room_numel >= world - 1, "an element of each other rank at least"
        for rank in range(world):
            position = bucket.row(rank).start
            for part in bucket.parts:
                assert part.starts[rank] == position, "parts of a row lie one after another"
                position += len(part.spans[rank])
                found.setdefault((part.unit.index, rank), []).append(part.spans[rank])
            assert position == bucket.row(rank).stop
    for unit in units:
        for rank in range(world):
            spans = found[unit.index, rank]
            assert spans[0].start == unit.shard(rank).start and spans[-1].stop == unit.shard(rank).stop
            assert all(left.stop == right.start for left, right in pairwise(spans))
        lasts = [part.is_last for bucket in buckets for part in bucket.parts if part.unit is unit]
        assert lasts == [False] * (len(lasts) - 1) + [True]
    order = [part.unit.index for bucket in buckets for part in bucket.parts]
    assert order == sorted(order, reverse=True), "the last unit first"


@pytest.mark.parametrize("world", [2, 4])
def test_small_units_share_a_bucket_and_large_ones_do_not(world: int) -> None:
    units = units_of([[SHARED_NUMEL // 4]] * 9, world)
    assert [len(bucket.parts) for bucket in cut_buckets(units, world, 1 << 22)] == [4, 4, 1]
    units = units_of([[SHARED_NUMEL], [3 * SHARED_NUMEL], [SHARED_NUMEL]], world)
    buckets = cut_buckets(units, world, 2 * SHARED_NUMEL)
    assert [(bucket.parts[0].unit.index, bucket.numel) for bucket in buckets] == [
        (2, SHARED_NUMEL), (1, 2 * SHARED_NUMEL), (1, SHARED_NUMEL), (0, SHARED_NUMEL)
    ]  # fmt: skip
