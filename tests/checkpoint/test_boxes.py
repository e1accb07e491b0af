"""A flat range is a few boxes, which are that range: element for element, in order."""

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.checkpoint.boxes import Box, boxes, flat_runs, flat_start

SHAPES = st.lists(st.integers(0, 5), max_size=5)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(SHAPES))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    numbers = numpy.arange(math.prod(shape)).reshape(shape)
    window = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
    return list(numbers[window].ravel().tolist()) if shape else [0]


@given(ranges())
def test_the_boxes_of_a_range_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    found = boxes(shape, start, stop)
    assert [number for box in found for number in elements(shape, box)] == [*range(start, stop)]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in found)
    for box in found:
        first = flat_start(shape, box.offsets)
        assert flat_runs(shape, box) == [(first, first + box.numel)], "each box is contiguous in the array"


@st.composite
def any_box(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(SHAPES))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, Box(offsets, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)))


@given(any_box())
def test_the_runs_of_any_box_are_its_elements(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    runs = flat_runs(shape, box)
    assert [number for start, stop in runs for number in range(start, stop)] == elements(shape, box)[: box.numel]


def test_a_range_in_the_middle_of_rows() -> None:
    assert boxes((4, 5), 3, 17) == [Box((0, 3), (1, 2)), Box((1, 0), (2, 5)), Box((3, 0), (1, 2))]
    assert boxes((), 0, 1) == [Box((), ())]
    assert boxes((3, 0), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_of_the_array_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside of the shape"):
        boxes((2, 3), start, stop)
