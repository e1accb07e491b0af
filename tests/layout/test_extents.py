"""Extents are disjoint, page-aligned, and all come back."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.errors import StoreError
from tiered_zero.layout.extents import ExtentMap
from tiered_zero.sizes import align_up

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * PAGE)), max_size=60))
def test_allocation_never_overlaps_and_free_plus_taken_is_the_capacity(acts: list[tuple[bool, int]]) -> None:
    extents = ExtentMap(20 * PAGE)
    taken: dict[int, int] = {}
    for allocates, number in acts:
        if allocates:
            offset = extents.allocate(number)
            if offset is None:
                gaps, at = [], 0
                for start, nbytes in [*sorted(taken.items()), (20 * PAGE, 0)]:
                    gaps.append(start - at)
                    at = start + nbytes
                assert max(gaps) < align_up(number, PAGE), "refused although there was room in one piece"
                continue
            assert offset % PAGE == 0
            taken[offset] = align_up(number, PAGE)
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            extents.free(offset, taken.pop(offset))
        spans = sorted(taken.items())
        assert all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans))
        assert extents.free_nbytes + sum(taken.values()) == 20 * PAGE
    for offset, nbytes in taken.items():
        extents.free(offset, nbytes)
    assert extents.allocate(20 * PAGE) == 0, "neighbours did not coalesce"


def test_claim_takes_exactly_that_extent() -> None:
    extents = ExtentMap(8 * PAGE)
    extents.claim(2 * PAGE, PAGE + 1)
    with pytest.raises(StoreError, match="overlaps"):
        extents.claim(3 * PAGE, 1)
    with pytest.raises(StoreError, match="outside"):
        extents.claim(7 * PAGE, 2 * PAGE)
    assert [extents.allocate(2 * PAGE), extents.allocate(4 * PAGE)] == [0, 4 * PAGE]
    assert extents.free_nbytes == 0


def test_freeing_twice_is_refused() -> None:
    extents = ExtentMap(4 * PAGE)
    extents.free(extents.allocate(PAGE) or 0, PAGE)
    for start, nbytes in ((0, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)):
        with pytest.raises(ValueError, match="not taken"):
            extents.free(start, nbytes)
