"""Say where bytes of a record rest, with what checksums, and whether bytes that were read are those written.

Every transfer of a store goes through `locate`, every read through `mismatches`: a step's reads straight into the
caller's memory, and the windows of whoever reads tags and commits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple, final

import xxhash

from tiered_zero.sizes import MIB
from tiered_zero.store.manifest import Range, Record

CHUNK_NBYTES: Final = MIB
"""A write is checksummed in pieces that end at multiples of this, counted from the record's start."""

digest: Final[Callable[[bytes | bytearray | memoryview], int]] = xxhash.xxh3_64_intdigest
"""xxh3-64 of one range; releases the GIL."""


class Span(NamedTuple):
    """Bytes `[start, end)` of a record, which rest at `address` of the store and behind. `checks`: the ranges that lie
    whole inside, and verify it."""

    address: int
    start: int
    end: int
    checks: list[Range]


def locate(record: Record, ranges: Iterable[Range], start: int, end: int, most_nbytes: int | None = None) -> list[Span]:
    """Find the bytes `[start, end)` of a record in ranges that overlap them, in order. Neighbours on the disk are one
    span, of at most `most_nbytes` unless a single range is longer."""
    spans: list[Span] = []
    for item in ranges:
        low, high = max(item.start, start), min(item.end, end)
        address = record.offsets[item.slot] + low
        checks = [item] if (low, high) == item[:2] else []
        last = spans[-1] if spans else None
        if (
            last is not None
            and (last.end, last.address + last.end - last.start) == (low, address)
            and (most_nbytes is None or high - last.start <= most_nbytes)
        ):
            last.checks.extend(checks)
            spans[-1] = last._replace(end=high)
        else:
            spans.append(Span(address, low, high, checks))
    return spans


def mismatches(checks: Iterable[Range], memory: memoryview, start: int) -> Iterator[tuple[Range, int]]:
    """Yield the ranges that are not as written, each with the checksum that it has. `memory`: holds the record's bytes
    from `start` on."""
    for item in checks:
        if (found := digest(memory[item.start - start : item.end - start])) != item.digest:
            yield item, found


def hashed(pieces: Iterable[Range], memory: memoryview, start: int) -> list[Range]:
    """Give the pieces of a write their checksums. `memory`: see `mismatches`."""
    return [piece._replace(digest=digest(memory[piece.start - start : piece.end - start])) for piece in pieces]


def is_same(kept: Sequence[Range], memory: memoryview, start: int) -> bool:
    """Whether `memory`, to be written at `start`, is what rests there, by the checksums of the same pieces."""
    pieces = cut(Range(start, start + len(memory), 0, None))
    return [item[:2] for item in kept] == [piece[:2] for piece in pieces] and not any(mismatches(kept, memory, start))


@final
class RangeMap:
    """Disjoint ranges in order. Not locked: the table's lock guards it."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges = list(ranges)

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
        self._ranges[low:high] = [*before, *ranges, *after]

    def _span(self, start: int, end: int) -> tuple[int, int]:
        low = bisect_right(self._ranges, start, key=itemgetter(1))
        return low, bisect_left(self._ranges, end, lo=low, key=itemgetter(0))


def first_gap(ranges: Iterable[Range | Span], start: int, end: int) -> int | None:
    """The first byte of `[start, end)` that these ranges (in order) do not cover."""
    for item in ranges:
        if item.start > start:
            break
        start = item.end
    return start if start < end else None


def other_slots(durable: Iterable[Range], start: int, end: int) -> Iterator[Range]:
    """`[start, end)` cut by the slot that may be written: the one of two that no range of the last commit names.
    `durable`: those that overlap it."""
    for item in durable:
        if start < item.start:
            yield Range(start, item.start, 0, None)
            start = item.start
        yield Range(start, min(item.end, end), 1 - item.slot, None)
        start = item.end
    if start < end:
        yield Range(start, end, 0, None)


def join(ranges: Iterable[Range]) -> list[Range]:
    """Adjacent ranges of one slot made one."""
    joined: list[Range] = []
    for item in ranges:
        if joined and joined[-1].slot == item.slot and joined[-1].end == item.start:
            joined[-1] = joined[-1]._replace(end=item.end)
        else:
            joined.append(item)
    return joined


def cut(item: Range) -> Iterator[Range]:
    """The range in pieces that end at multiples of CHUNK_NBYTES: each gets a checksum."""
    start = item.start
    while start < item.end:
        end = min(item.end, (start // CHUNK_NBYTES + 1) * CHUNK_NBYTES)
        yield Range(start, end, item.slot, None)
        start = end
