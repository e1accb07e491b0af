"""Addresses over several files: every byte once, the files' sizes to the byte, the weights met."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.errors import StoreError
from tiered_zero.record.data_files import STRIPE_NBYTES, Stripes
from tiered_zero.sizes import MIB

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


@given(WEIGHTS, st.integers(1, 2000), st.integers(0, STRIPE_NBYTES - 1))
def test_pieces_tile_the_files_without_overlap(weights: list[float], stripes: int, rest: int) -> None:
    capacity = stripes * STRIPE_NBYTES + rest
    layout = Stripes(weights)
    sizes = layout.file_nbytes(capacity)
    assert sum(sizes) == capacity
    filled = [0] * len(weights)
    for piece in layout.pieces(0, capacity):
        assert piece.file_offset == filled[piece.file_index], "a hole or an overlap in the file"
        filled[piece.file_index] += piece.nbytes
    assert filled == sizes
    if stripes >= 640:
        for weight, size in zip(weights, sizes, strict=True):
            assert abs(size / capacity - weight / sum(weights)) < 0.02


@given(WEIGHTS, st.integers(0, 1 << 40), st.integers(1, 1 << 25), st.integers(0, 1 << 25))
def test_a_part_lies_where_the_whole_put_it(weights: list[float], offset: int, nbytes: int, skip: int) -> None:
    layout = Stripes(weights)
    place = {}
    at = offset
    for piece in layout.pieces(offset, nbytes):
        place[at] = piece
        at += piece.nbytes
    assert at == offset + nbytes
    inner = offset + skip % nbytes
    start = max(address for address in place if address <= inner)
    piece = next(layout.pieces(inner, 1))
    assert piece[:2] == (place[start].file_index, place[start].file_offset + inner - start)


def test_one_file_is_one_piece() -> None:
    assert [tuple(piece) for piece in Stripes([7]).pieces(123, 100 * MIB)] == [(0, 123, 100 * MIB)]


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0]])
def test_weights_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(StoreError, match="> 0"):
        Stripes(weights)
