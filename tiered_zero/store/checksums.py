"""Checksums of a store: those of a write, and whether the bytes of a read are those written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import xxhash

from tiered_zero.sizes import MIB
from tiered_zero.store.ranges import Range, cut

CHUNK_NBYTES = MIB
"""A write is checksummed in pieces that end at multiples of this, counted from the record's start."""

digest: Callable[[bytes | bytearray | memoryview], int] = xxhash.xxh3_64_intdigest
"""xxh3-64 of one range; releases the GIL."""


def hashed(pieces: Iterable[Range], data: memoryview, offset: int) -> list[Range]:
    """Give the pieces of a write their checksums. `data` begins at byte `offset` of the record."""
    return [piece._replace(digest=_digest_of(piece, data, offset)) for piece in pieces]


def first_mismatch(ranges: Iterable[Range], data: memoryview, offset: int) -> tuple[Range, int] | None:
    """Find the first range whose bytes in `data` are not those written, and the checksum that they have."""
    found = ((item, _digest_of(item, data, offset)) for item in ranges)
    return next(((item, number) for item, number in found if number != item.digest), None)


def is_same(kept: Sequence[Range], data: memoryview, offset: int) -> bool:
    """Whether `data`, to be written at `offset`, is what rests there, by the checksums of the same pieces."""
    pieces = list(cut(Range(offset, offset + len(data), 0, None), CHUNK_NBYTES))
    return [item[:2] for item in kept] == [piece[:2] for piece in pieces] and not first_mismatch(kept, data, offset)


def _digest_of(item: Range, data: memoryview, offset: int) -> int:
    return digest(data[item.start - offset : item.end - offset])
