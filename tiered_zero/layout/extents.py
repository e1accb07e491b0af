"""Allocate extents (ranges of bytes) of a store, and divide a store's bytes among several files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes

STRIPE_NBYTES = 4 << 20
"""Bytes of a stripe: large enough for a disk's full rate, small enough that one record uses every disk."""

STRIPES_PER_CYCLE = 64
"""Stripes in one cycle over all files of a store. Each file gets stripes in proportion to the speed of its disk. With
two files, rounding changes a file's share by at most 1/128."""


@final
class ExtentMap:
    """Allocates disjoint page-aligned extents of `[0, capacity_nbytes)`, lowest offset first. Not thread-safe."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = align_up(capacity_nbytes, PAGE_NBYTES)
        self._free: list[tuple[int, int]] = [(0, self.capacity_nbytes)] if self.capacity_nbytes else []

    @property
    def free_nbytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def allocate(self, nbytes: int) -> int | None:
        """Allocate `nbytes`, rounded up to pages. Return the offset; None if no free extent is large enough."""
        need = align_up(nbytes, PAGE_NBYTES)
        for index, (start, end) in enumerate(self._free):
            if end - start >= need:
                self._free[index : index + 1] = [(start + need, end)] if end - start > need else []
                return start
        return None

    def grow(self, capacity_nbytes: int) -> None:
        """Raise the capacity to `capacity_nbytes` (whole pages), and add the new bytes to the free extents."""
        start, self.capacity_nbytes = self.capacity_nbytes, capacity_nbytes
        if self._free and self._free[-1][1] == start:
            start = self._free.pop()[0]
        self._free.append((start, capacity_nbytes))

    def describe(self) -> str:
        """Describe the free extents, for the error of a failed allocation."""
        largest_nbytes = max((end - start for start, end in self._free), default=0)
        return (
            f"of {format_nbytes(self.capacity_nbytes)}, {format_nbytes(self.free_nbytes)} are free "
            f"({self.free_nbytes} bytes), {format_nbytes(largest_nbytes)} in one piece"
        )

    def claim(self, offset: int, nbytes: int) -> None:
        """Allocate the extent at `offset`. Raises StoreError if a part of it is not free."""
        end = offset + align_up(nbytes, PAGE_NBYTES)
        for index, (free_start, free_end) in enumerate(self._free):
            if free_start <= offset and end <= free_end:
                left, right = (free_start, offset), (end, free_end)
                self._free[index : index + 1] = [piece for piece in (left, right) if piece[0] < piece[1]]
                return
        raise StoreError(f"The extent at {offset} of {nbytes} bytes overlaps another or lies outside of the store.")

    def free(self, offset: int, nbytes: int) -> None:
        """Free an allocated extent. Raises ValueError if the extent is not allocated."""
        start, end = offset, offset + align_up(nbytes, PAGE_NBYTES)
        index = bisect_left(self._free, (start, end))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        if (before and before[1] > start) or (after and after[0] < end) or end > self.capacity_nbytes:
            raise ValueError(f"The extent at {offset} of {nbytes} bytes is not taken; it was freed before.")
        low = index - 1 if before and before[1] == start else index
        high = index + 1 if after and after[0] == end else index
        self._free[low:high] = [
            (self._free[low][0] if low < index else start, after[1] if high > index and after else end)
        ]


def stripe_cycle(weights: Sequence[float]) -> list[int]:
    """Return the file index of each stripe in one cycle, which repeats. File i gets stripes in proportion to
    weights[i], evenly spread."""
    credit = [0.0] * len(weights)
    cycle = []
    for _ in range(STRIPES_PER_CYCLE):
        credit = [have + weights[index] for index, have in enumerate(credit)]
        index = credit.index(max(credit))
        credit[index] -= sum(weights)
        cycle.append(index)
    return cycle


def file_nbytes(capacity_nbytes: int, weights: Sequence[float]) -> list[int]:
    """Return the bytes of each file of a store; their sum is the capacity. `weights`: the speed of each file's
    disk, in any unit."""
    if len(weights) == 1:
        return [capacity_nbytes]
    cycle = stripe_cycle(weights)
    num_cycles, rest = divmod(capacity_nbytes, STRIPE_NBYTES * len(cycle))
    sizes = [num_cycles * cycle.count(index) * STRIPE_NBYTES for index in range(len(weights))]
    for index in cycle:
        piece = min(rest, STRIPE_NBYTES)
        sizes[index] += piece
        rest -= piece
    return sizes
