"""A unit's flat: every parameter once, aligned, inside, and padded to whole pages for every rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.units import make_unit
from tiered_zero.layout.flat import PARAM_ALIGNMENT_NBYTES, ParamSpec, place_by_rank, place_params
from tiered_zero.sizes import PAGE_NBYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)


@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    world_size=st.integers(1, 5),
)
def test_entries_lie_in_order_aligned_and_apart(numels: list[int], dtype: torch.dtype, world_size: int) -> None:
    unit = make_unit(0, numels, dtype, world_size=world_size)
    assert [entry.param.numel for entry in unit.entries] == numels
    for entry in unit.entries:
        assert entry.start * dtype.itemsize % PARAM_ALIGNMENT_NBYTES == 0
        assert entry.stop == entry.start + entry.param.numel
    for left, right in pairwise(unit.entries):
        assert 0 <= (right.start - left.stop) * dtype.itemsize < PARAM_ALIGNMENT_NBYTES
    assert unit.entries[-1].stop <= unit.numel


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    world_size=st.integers(1, 5),
)
def test_every_rank_gets_whole_pages_of_one_size(numels: list[int], dtype: torch.dtype, world_size: int) -> None:
    unit = make_unit(0, numels, dtype, world_size=world_size)
    (shard,) = {len(unit.shard(rank)) for rank in range(world_size)}
    assert unit.numel == world_size * shard and len(unit.bounds) == world_size + 1
    assert shard * dtype.itemsize % PAGE_NBYTES == 0
    assert shard % (PAGE_NBYTES // 2) == 0, "a shard is whole pages in 16 bit and in fp32"
    assert unit.nbytes == unit.numel * dtype.itemsize
    shortest = unit.entries[-1].stop
    page = max(PAGE_NBYTES // 2, PAGE_NBYTES // dtype.itemsize)
    assert unit.numel - shortest < page * world_size, "padding is less than a page a rank"


@given(
    numels=st.lists(st.integers(0, 50_000), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    world_size=st.integers(1, 5),
)
def test_ranks_own_whole_parameters(numels: list[int], dtype: torch.dtype, world_size: int) -> None:
    """Shards of whole pages, each parameter within one, in their order; none is larger than its share by more than the
    largest parameter."""
    specs = [ParamSpec(name=f"p{k}", shape=(n,), dtype=dtype, trainable=True, index=k) for k, n in enumerate(numels)]
    entries, bounds = place_by_rank(specs, dtype.itemsize, world_size)
    assert [entry.param for entry in entries] == specs
    assert bounds[0] == 0 and len(bounds) == world_size + 1
    assert all(bound * dtype.itemsize % PAGE_NBYTES == 0 == bound % (PAGE_NBYTES // 2) for bound in bounds)
    assert all(left.stop <= right.start for left, right in pairwise(entries)) and entries[-1].stop <= bounds[-1]
    for start, stop in pairwise(bounds):
        own = [entry for entry in entries if start <= entry.start < stop]
        assert all(entry.stop <= stop for entry in own)
        assert sum(entry.param.numel for entry in own) <= sum(numels) / world_size + max(numels)
    for entry in entries:
        assert entry.start * dtype.itemsize % PARAM_ALIGNMENT_NBYTES == 0


def test_a_uint8_unit_is_whole_pages() -> None:
    assert make_unit(0, [1], torch.uint8).nbytes == PAGE_NBYTES
    assert make_unit(0, [PAGE_NBYTES + 1], torch.uint8).nbytes == 2 * PAGE_NBYTES


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0,), 0), ((0, 7), 0), ((3, 4), 12)])
def test_numel_of_scalars_and_empties(shape: tuple[int, ...], numel: int) -> None:
    spec = ParamSpec(name="p", shape=shape, dtype=torch.float32, trainable=True, index=0)
    assert spec.numel == numel
    (entry,) = place_params([spec])
    assert (entry.start, entry.stop) == (0, numel)


def test_an_empty_parameter_takes_no_room_between_others() -> None:
    unit = make_unit(0, [128, 0, 128])
    assert [(entry.start, entry.stop) for entry in unit.entries] == [(0, 128), (128, 128), (128, 256)]


def test_a_parameter_is_aligned_as_a_tensor_of_its_own_is_on_an_accelerator() -> None:
    """512 bytes, for any dtype: else a GEMM library may choose another kernel for it."""
    for dtype in (torch.float32, torch.bfloat16):
        unit = make_unit(0, [1, 700, 3, 5000], dtype)
        assert all(entry.start * dtype.itemsize % 512 == 0 for entry in unit.entries)
