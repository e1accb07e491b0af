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

_SAMPLE = 16
"""With checksums "sample" one chunk of so many has one."""

ChecksumMode = Literal["all", "sample", "off"]

digest: Callable[[bytes | bytearray | memoryview], int] = xxhash.xxh3_64_intdigest
"""xxh3-64 of one range; releases the GIL."""


@final
class Checksums:
    """Which pieces of writes get a checksum. One thread; the functions below run on any."""

    def __init__(self, mode: ChecksumMode) -> None:
        """Raises StoreError for another mode."""
        if mode not in ("all", "sample", "off"):
            raise StoreError(f"checksums must be all, sample or off; found {mode!r}.")
        self.is_off, self.is_whole = mode == "off", mode == "all"
        self._every = _SAMPLE if mode == "sample" else 1
        self._num_chunks = 0

    def cut(self, runs: Iterable[Range]) -> list[tuple[Range, bool]]:
        """Cut what is written at chunk borders. Returns the pieces, each with whether it gets a checksum."""
        return [(piece, self._is_hashed()) for run in runs for piece in cut(run, CHUNK_NBYTES)]

    def verifiable(self, ranges: Iterable[Range], start: int, end: int) -> list[Range]:
        """List the ranges that a read of `[start, end)` is checked by: those with a checksum that lie whole in it."""
        return [r for r in ranges if r.digest is not None and start <= r.start and r.end <= end and not self.is_off]

    def _is_hashed(self) -> bool:
        self._num_chunks += 1
        return not self.is_off and (self._num_chunks - 1) % self._every == 0


def hashed(pieces: Iterable[tuple[Range, bool]], data: memoryview, offset: int) -> list[Range]:
    """Give the pieces of `cut` their checksums. `data` begins at the record's byte `offset`."""
    return [piece._replace(digest=_digest_of(piece, data, offset)) if wanted else piece for piece, wanted in pieces]


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
