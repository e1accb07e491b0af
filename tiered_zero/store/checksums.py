"""Checksums of a store: which parts of a write get one, and whether the bytes of a read are those written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, final

import xxhash

from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB
from tiered_zero.store.ranges import Range, cut

CHUNK_NBYTES = MIB
"""A write is checksummed in pieces that end at multiples of this, counted from the record's start."""

ChecksumMode = Literal["all", "off"]

digest: Callable[[bytes | bytearray | memoryview], int] = xxhash.xxh3_64_intdigest
"""xxh3-64 of one range; releases the GIL."""


@final
class Checksums:
    """Whether the pieces of writes get a checksum. Any thread."""

    def __init__(self, mode: ChecksumMode) -> None:
        """Raises StoreError for another mode."""
        if mode not in ("all", "off"):
            raise StoreError(f"checksums must be all or off; found {mode!r}.")
        self.is_off = mode == "off"

    def cut(self, runs: Iterable[Range]) -> list[Range]:
        """Cut what is written at chunk borders."""
        return [piece for run in runs for piece in cut(run, CHUNK_NBYTES)]

    def hashed(self, pieces: Sequence[Range], data: memoryview, offset: int) -> list[Range]:
        """Give the pieces their checksums, unless those are off. `data` begins at byte `offset` of the record."""
        return [piece if self.is_off else piece._replace(digest=_digest_of(piece, data, offset)) for piece in pieces]

    def verifiable(self, ranges: Iterable[Range], start: int, end: int) -> list[Range]:
        """List the ranges that a read of `[start, end)` is checked by: those with a checksum that lie whole in it."""
        return [r for r in ranges if r.digest is not None and start <= r.start and r.end <= end and not self.is_off]


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
