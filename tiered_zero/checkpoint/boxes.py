"""A flat range of an array as boxes: Distributed Checkpoint speaks of boxes, sub-groups are flat ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of an array: indices `[offsets[d], offsets[d] + sizes[d])` of each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """1 for an array without dimensions."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The row-major elements `[start, stop)` of an array as boxes, in order; each is contiguous in the array.

    At most 2 * len(shape) - 1 of them, and one of an array without dimensions: the rest of a row that is begun at
    each level, the whole rows between, and the beginning of the last row.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} are outside of the shape {shape}")
    return _boxes((), shape, start, stop)


def _boxes(rows: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """`rows`: the indices in the dimensions before those of `shape`."""
    if start == stop:
        return []
    ones = (1,) * len(rows)
    if not shape:
        return [Box(rows, ones)]
    row_numel = math.prod(shape[1:])
    first, head = divmod(start, row_numel)
    last, tail = divmod(stop, row_numel)
    if first == last:
        return _boxes((*rows, first), shape[1:], head, tail)
    found = []
    if head:
        found += _boxes((*rows, first), shape[1:], head, row_numel)
        first += 1
    if first < last:
        found.append(Box((*rows, first, *(0 for _ in shape[1:])), (*ones, last - first, *shape[1:])))
    if tail:
        found += _boxes((*rows, last), shape[1:], 0, tail)
    return found


def flat_start(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The row-major number of the element at `offsets`."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position


def flat_runs(shape: Sequence[int], box: Box) -> list[tuple[int, int]]:
    """The elements of a box as flat ranges `[start, stop)` of the array, in order: one for a box of `boxes`."""
    if not box.numel:
        return []
    num_outer = len(shape)  # dimensions that are walked; those after them are one run
    while num_outer and box.sizes[num_outer:] == tuple(shape[num_outer:]):
        num_outer -= 1
    run_numel = math.prod(box.sizes[num_outer:])
    runs = []
    for number in range(math.prod(box.sizes[:num_outer])):
        index = []
        for size in reversed(box.sizes[:num_outer]):
            number, at = divmod(number, size)
            index.append(at)
        offsets = [base + at for base, at in zip(box.offsets, reversed(index), strict=False)]
        start = flat_start(shape, [*offsets, *box.offsets[num_outer:]])
        runs.append((start, start + run_numel))
    return runs


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def permuted(values: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """`values` of the dimensions in memory order."""
    return tuple(values) if order is None else tuple(values[dimension] for dimension in order)


def unpermuted(values: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """`values` in memory order -> of the tensor's dimensions."""
    if order is None:
        return tuple(values)
    found = [0] * len(order)
    for value, dimension in zip(values, order, strict=True):
        found[dimension] = value
    return tuple(found)
