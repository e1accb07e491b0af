"""The range map against a list with one entry a byte."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.record.manifest import Range, RangeMap, Record, Span, cut, first_gap, join, locate, other_slots
from tiered_zero.sizes import MIB

LENGTH = 24
SPAN = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(lambda s: (s[0], min(LENGTH, s[0] + s[1])))


@given(st.lists(st.tuples(SPAN, st.integers(0, 1)), max_size=20), SPAN)
def test_replace_and_overlapping(writes: list[tuple[tuple[int, int], int]], asked: tuple[int, int]) -> None:
    ranges, slots = RangeMap(), [None] * LENGTH
    digests: list[int | None] = [None] * LENGTH
    for number, ((start, end), slot) in enumerate(writes):
        touched = set(digests[start:end])
        digests = [None if digest in touched else digest for digest in digests]  # only a part of its range is left
        ranges.replace(start, end, [Range(start, end, slot, number)])
        slots[start:end] = [slot] * (end - start)  # type: ignore[list-item]
        digests[start:end] = [number] * (end - start)
    seen_slots, seen_digests = [None] * LENGTH, [None] * LENGTH
    at = 0
    for item in ranges:
        assert at <= item.start < item.end
        at = item.end
        seen_slots[item.start : item.end] = [item.slot] * (item.end - item.start)  # type: ignore[list-item]
        seen_digests[item.start : item.end] = [item.digest] * (item.end - item.start)  # type: ignore[list-item]
    assert seen_slots == slots and seen_digests == digests
    found = ranges.overlapping(*asked)
    assert found == [item for item in ranges if item.start < asked[1] and asked[0] < item.end]
    gap = next((i for i in range(*asked) if slots[i] is None), None)
    assert first_gap(found, *asked) == gap
    other = list(other_slots(ranges.overlapping(*asked), *asked))
    assert (other[0].start, other[-1].end) == asked and first_gap(other, *asked) is None
    for item in other:
        assert {slots[i] for i in range(item.start, item.end)} <= ({None, 1} if item.slot == 0 else {0})


def test_join_and_cut() -> None:
    a, b, c = Range(0, 3, 0, None), Range(3, 5, 0, None), Range(5, 6, 1, None)
    assert join([a, b, c]) == [Range(0, 5, 0, None), c]
    assert join([a, Range(4, 5, 0, None)]) == [a, Range(4, 5, 0, None)]
    ends = [3, MIB, 2 * MIB, 2 * MIB + 5]
    assert list(cut(Range(3, 2 * MIB + 5, 1, 7))) == [Range(*pair, 1, None) for pair in pairwise(ends)]
    assert list(other_slots([], 2, 4)) == [Range(2, 4, 0, None)]


def test_neighbours_on_the_disk_are_one_span_with_the_checksums_of_whole_ranges() -> None:
    record = Record(name="a", nbytes=40960, committed=True, offsets=(0, 65536))
    a, b, c = Range(0, 4096, 0, 1), Range(4096, 12288, 0, 2), Range(12288, 16384, 1, 3)
    assert locate(record, [a, b, c], 0, 16384) == [Span(0, 0, 12288, [a, b]), Span(77824, 12288, 16384, [c])]
    assert locate(record, [a, b], 0, 8192) == [Span(0, 0, 8192, [a])], "what is read in part is not verified"
    assert locate(record, [a, b], 0, 12288, 8192) == [Span(0, 0, 4096, [a]), Span(4096, 4096, 12288, [b])]
