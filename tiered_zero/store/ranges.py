"""The ranges written inside one record: a map of disjoint ranges, each with its slot and checksum."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, final


class Range(NamedTuple):
    """Bytes `[start, end)` of a record rest in `slot`. `digest`: xxh3-64 of all of them, or None: not verifiable."""

    start: int
    end: int
    slot: int
    digest: int | None


@final
class RangeMap:
    """Disjoint ranges in order. Not locked: the store's lock guards it."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges = list(ranges)
        self._starts = [item.start for item in self._ranges]

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def overlapping(self, start: int, end: int) -> list[Range]:
        """The ranges that share bytes with `[start, end)`, untrimmed, in order."""
        low, high = self._span(start, end)
        return self._ranges[low:high]

    def replace(self, start: int, end: int, ranges: Sequence[Range]) -> None:
        """`ranges` (which tile `[start, end)`) take the place of what was there.

        A range of which only a part is replaced keeps the rest without its checksum.
        """
        low, high = self._span(start, end)
        kept = self._ranges[low:high]
        before = [kept[0]._replace(end=start, digest=None)] if kept and kept[0].start < start else []
        after = [kept[-1]._replace(start=end, digest=None)] if kept and kept[-1].end > end else []
        new = [*before, *ranges, *after]
        self._ranges[low:high] = new
        self._starts[low:high] = [item.start for item in new]

    def _span(self, start: int, end: int) -> tuple[int, int]:
        low = bisect_right(self._starts, start) - 1
        if low < 0 or self._ranges[low].end <= start:
            low += 1
        return low, bisect_left(self._starts, end, lo=low)


def first_gap(ranges: Iterable[Range], start: int, end: int) -> int | None:
    """The first byte of `[start, end)` that these ranges (in order) do not cover."""
    for item in ranges:
        if item.start > start:
            break
        start = item.end
    return start if start < end else None


def other_slots(durable: RangeMap | None, start: int, end: int) -> Iterator[Range]:
    """`[start, end)` cut by the slot that may be written: the one of two that the durable map does not name."""
    for item in durable.overlapping(start, end) if durable is not None else ():
        if start < item.start:
            yield Range(start, item.start, 0, None)
            start = item.start
        yield Range(start, min(item.end, end), 1 - item.slot, None)
        start = item.end
    if start < end:
        yield Range(start, end, 0, None)


def join(ranges: Iterable[Range]) -> list[Range]:
    """Adjacent ranges of one slot made one: each becomes one request."""
    joined: list[Range] = []
    for item in ranges:
        if joined and joined[-1].slot == item.slot and joined[-1].end == item.start:
            joined[-1] = joined[-1]._replace(end=item.end)
        else:
            joined.append(item)
    return joined


def cut(item: Range, chunk_nbytes: int) -> Iterator[Range]:
    """The range in pieces that end at multiples of `chunk_nbytes`."""
    start = item.start
    while start < item.end:
        end = min(item.end, (start // chunk_nbytes + 1) * chunk_nbytes)
        yield Range(start, end, item.slot, None)
        start = end
