"""Which bytes of a store are taken: a free list of page-aligned extents. Pure arithmetic, no files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes


@final
class ExtentMap:
    """Hands out disjoint page-aligned extents of `[0, capacity_nbytes)`; neighbours coalesce when freed.

    The lowest extent that fits is taken, so records reserved in one go lie side by side in that order.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = align_up(capacity_nbytes, PAGE_NBYTES)
        self._free: list[tuple[int, int]] = [(0, self.capacity_nbytes)] if self.capacity_nbytes else []

    @property
    def free_nbytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def allocate(self, nbytes: int) -> int:
        """The offset of a new extent of `nbytes` rounded up to pages. Raises StoreError when none is large enough."""
        need = align_up(nbytes, PAGE_NBYTES)
        for index, (start, end) in enumerate(self._free):
            if end - start >= need:
                self._free[index : index + 1] = [(start + need, end)] if end - start > need else []
                return start
        largest = max((end - start for start, end in self._free), default=0)
        raise StoreError(
            f"The store needs {format_nbytes(need)} ({need} bytes) for one extent; of its "
            f"{format_nbytes(self.capacity_nbytes)} there are {format_nbytes(self.free_nbytes)} "
            f"({self.free_nbytes} bytes) left, {format_nbytes(largest)} in one piece. Create it with a larger capacity."
        )

    def claim(self, offset: int, nbytes: int) -> None:
        """Take exactly this extent (recovery from a manifest). Raises StoreError if a part is taken."""
        end = offset + align_up(nbytes, PAGE_NBYTES)
        for index, (free_start, free_end) in enumerate(self._free):
            if free_start <= offset and end <= free_end:
                left, right = (free_start, offset), (end, free_end)
                self._free[index : index + 1] = [piece for piece in (left, right) if piece[0] < piece[1]]
                return
        raise StoreError(f"The extent at {offset} of {nbytes} bytes overlaps another or lies outside of the store.")

    def free(self, offset: int, nbytes: int) -> None:
        """Give an extent back."""
        start, end = offset, offset + align_up(nbytes, PAGE_NBYTES)
        index = bisect_left(self._free, (start, end))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        if (before and before[1] > start) or (after and after[0] < end) or end > self.capacity_nbytes:
            raise StoreError(f"The extent at {offset} of {nbytes} bytes is not taken; it was freed before.")
        low = index - 1 if before and before[1] == start else index
        high = index + 1 if after and after[0] == end else index
        self._free[low:high] = [
            (self._free[low][0] if low < index else start, after[1] if high > index and after else end)
        ]


def pack(sizes: Mapping[str, int], alignment: int = 64) -> tuple[dict[str, int], int]:
    """Offsets of small items laid side by side in one extent, and the bytes they take together."""
    offsets: dict[str, int] = {}
    total = 0
    for name, nbytes in sizes.items():
        offsets[name] = total
        total = align_up(total + nbytes, alignment)
    return offsets, total
