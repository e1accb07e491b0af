"""Define the manifest of a store (a set of data files): the durable table of its records and their checksums.

The store's first directory has the file `manifest` for the committed state, and `manifest.next` for a prepared state.
Processes that commit together all prepare, wait for each other, and then confirm. So at any time there is one step
whose state is in the directories of all processes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, final

import numpy
import xxhash
from pydantic import Field, model_validator

from tiered_zero.errors import StoreError
from tiered_zero.record.files import (
    MOST_NBYTES,
    Count,
    Digest,
    JsonFile,
    StrictModel,
    error_text,
    next_path,
    open_directory,
    read_file,
)
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up

MANIFEST_NAME: Final = "manifest"
NEXT_NAME: Final = next_path(Path(MANIFEST_NAME)).name


class Range(NamedTuple):
    """The bytes `[start, end)` of a record, in the record's slot number `slot`. `digest`: the xxh3-64 of these bytes;
    None if they cannot be verified."""

    start: Count
    end: Count
    slot: Count
    digest: Digest | None


@final
class Record(StrictModel):
    """A named region of a store (a set of data files). `nbytes`: the requested size. `offsets`: the addresses of the
    record's slots (one or two) in the store."""

    name: str
    nbytes: Annotated[Count, Field(gt=0)]
    committed: bool
    offsets: tuple[Count, ...]

    @property
    def extent_nbytes(self) -> int:
        """The size of one slot: `nbytes`, rounded up to whole pages."""
        return align_up(self.nbytes, PAGE_NBYTES)

    @model_validator(mode="after")
    def _check(self) -> Record:
        if len(self.offsets) not in (1, 1 + self.committed) or any(at % PAGE_NBYTES for at in self.offsets):
            raise ValueError(f"{self.name[:80]!a}: expected one offset for each slot, in whole pages")
        return self


class Contents(StrictModel):
    """The table of a store's records. `capacity_nbytes`: the size of all data files together. `weights`: one number for
    each data file, proportional to the file's share of the store. `ranges`: the written ranges of each record, by
    record name."""

    capacity_nbytes: Count
    weights: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1)]
    records: tuple[Record, ...] = ()
    ranges: dict[str, list[Range]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Contents:
        by_name = {record.name: record for record in self.records}
        if len(by_name) != len(self.records) or self.ranges.keys() != by_name.keys():
            raise ValueError("expected records of different names, and the ranges of each")
        for name, record in by_name.items():
            if max(record.offsets) + record.extent_nbytes > self.capacity_nbytes:
                raise ValueError(f"record {name[:80]!a} lies outside of its store")
            if self.ranges[name] and not _is_in_order(self.ranges[name], record):
                raise ValueError(f"expected ranges of {name[:80]!a} in order, in whole pages and inside of its slots")
        return self


def _is_in_order(ranges: Sequence[Range], record: Record) -> bool:
    """Return whether ranges (at least one) are disjoint, in order, in whole pages and inside the record's slots."""
    starts, ends, slots = numpy.array([item[:3] for item in ranges], numpy.int64).T
    return bool(
        (starts < ends).all()
        and (ends[:-1] <= starts[1:]).all()
        and ends[-1] <= record.extent_nbytes
        and not ((starts | ends) % PAGE_NBYTES).any()
        and slots.max() < len(record.offsets)
    )


@final
class Manifest(Contents, JsonFile):
    """One committed or prepared state of a store. `metadata`: the caller's own values, JSON only."""

    format_name = "tiered_zero.store"

    run_id: str
    step: Count
    metadata: dict[str, Any] = Field(default_factory=dict)

    def is_state(self, step: int | None, metadata: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Return whether this is a state of step `step` (None: any step) that has all items of `metadata`."""
        return step in (None, self.step) and all(self.metadata.get(key) == item for key, item in metadata.items())


# -- ranges ----------------------------------------------------------------------------------------------------------


CHUNK_NBYTES: Final = MIB
"""The largest number of bytes with one checksum. A write is cut at multiples of this number, counted from the record's
start."""

digest: Final[Callable[[bytes | bytearray | memoryview], int]] = xxhash.xxh3_64_intdigest
"""Returns the xxh3-64 of some bytes. Releases the GIL."""


class Span(NamedTuple):
    """Bytes `[start, end)` of a record that are contiguous in the store, from `address` on. `checks`: the ranges (bytes
    with one checksum) that lie completely in the span. Only these ranges can be verified."""

    address: int
    start: int
    end: int
    checks: list[Range]


def locate(record: Record, ranges: Iterable[Range], start: int, end: int, most_nbytes: int | None = None) -> list[Span]:
    """Return the spans that hold the bytes `[start, end)` of a record, in order. `ranges`: the record's ranges that
    hold these bytes. `most_nbytes`: the size limit of a span that joins several ranges; None: no limit."""
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
    """Verify the ranges `checks`. Yield each range whose checksum differs, with the checksum that was found. `memory`:
    the record's bytes from `start` on."""
    for item in checks:
        if (found := digest(memory[item.start - start : item.end - start])) != item.digest:
            yield item, found


def hashed(pieces: Iterable[Range], memory: memoryview, start: int) -> list[Range]:
    """Return `pieces`, the ranges of a write, each with its checksum. `memory`: the record's bytes from `start` on."""
    return [piece._replace(digest=digest(memory[piece.start - start : piece.end - start])) for piece in pieces]


def is_same(kept: Sequence[Range], memory: memoryview, start: int) -> bool:
    """Return whether a write of `memory` would change nothing: the ranges `kept` cover the same bytes, and have the
    same checksums. `start`: the first byte of `memory` in the record."""
    pieces = cut(Range(start, start + len(memory), 0, None))
    return [item[:2] for item in kept] == [piece[:2] for piece in pieces] and not any(mismatches(kept, memory, start))


@final
class RangeMap:
    """The written ranges of one record, disjoint and in order. Use it under the lock of `RecordTable`."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges = list(ranges)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def overlapping(self, start: int, end: int) -> list[Range]:
        """Return the ranges that share bytes with `[start, end)`, in order. They are not cut at `start` and `end`."""
        low, high = self._span(start, end)
        return self._ranges[low:high]

    def replace(self, start: int, end: int, ranges: Sequence[Range]) -> None:
        """Replace the bytes `[start, end)` by `ranges`, which cover exactly these bytes."""
        low, high = self._span(start, end)
        kept = self._ranges[low:high]
        # a range that reaches outside keeps its outer part, which cannot be verified any more
        before = [kept[0]._replace(end=start, digest=None)] if kept and kept[0].start < start else []
        after = [kept[-1]._replace(start=end, digest=None)] if kept and kept[-1].end > end else []
        self._ranges[low:high] = [*before, *ranges, *after]

    def _span(self, start: int, end: int) -> tuple[int, int]:
        low = bisect_right(self._ranges, start, key=itemgetter(1))
        return low, bisect_left(self._ranges, end, lo=low, key=itemgetter(0))


def first_gap(ranges: Iterable[Range | Span], start: int, end: int) -> int | None:
    """Return the first byte of `[start, end)` that no range covers; None if all are covered. `ranges`: in order."""
    for item in ranges:
        if item.start > start:
            break
        start = item.end
    return start if start < end else None


def other_slots(durable: Iterable[Range], start: int, end: int) -> Iterator[Range]:
    """Choose the slots for a write of the bytes `[start, end)`. Yield the ranges to write, in order. They overwrite no
    byte of the last commit. `durable`: the ranges of the last commit that overlap `[start, end)`, in order."""
    for item in durable:
        if start < item.start:
            yield Range(start, item.start, 0, None)
            start = item.start
        yield Range(start, min(item.end, end), 1 - item.slot, None)
        start = item.end
    if start < end:
        yield Range(start, end, 0, None)


def join(ranges: Iterable[Range]) -> list[Range]:
    """Join adjacent ranges of the same slot."""
    joined: list[Range] = []
    for item in ranges:
        if joined and joined[-1].slot == item.slot and joined[-1].end == item.start:
            joined[-1] = joined[-1]._replace(end=item.end)
        else:
            joined.append(item)
    return joined


def cut(item: Range) -> Iterator[Range]:
    """Cut a range at multiples of CHUNK_NBYTES and yield the pieces, without checksums."""
    start = item.start
    while start < item.end:
        end = min(item.end, (start // CHUNK_NBYTES + 1) * CHUNK_NBYTES)
        yield Range(start, end, item.slot, None)
        start = end


# -- the files of a store's first directory ----------------------------------------------------------------------------


def load(directory: Path) -> tuple[Manifest | None, Manifest | None]:
    """Return the committed and the prepared manifest. Each is None if it is absent. A damaged `manifest.next` counts as
    absent. Raises StoreError if `manifest` is damaged or the directory cannot be read."""
    try:
        with open_directory(directory) as fd:
            return load_at(fd, directory)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StoreError(f"{directory} cannot be read: {error}.") from error


def choose(
    directory: Path, step: int | None, metadata: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Manifest, bool]:
    """Return the manifest of the state to open, and whether this state is committed. `step`: the wanted step, committed
    or prepared; None: the committed state. `metadata`: items that the state must have. Raises StoreError if no state
    fits."""
    committed, prepared = load(directory)
    if committed is not None and committed.is_state(step, metadata):
        return committed, True
    if prepared is not None and step is not None and prepared.is_state(step, metadata):
        return prepared, False
    wanted = "a committed state" if step is None else f"the state of step {step}"
    steps = sorted({state.step for state in (committed, prepared) if state is not None})
    others = ", of other commits" if step in steps else ""
    advice = (
        " All parts of a commit are of one step: put the directory that is behind back as the commit left it, or go on "
        "from another checkpoint."
    )
    raise StoreError(f"{directory} does not hold {wanted}; it has the steps {steps}{others}.{advice if steps else ''}")


def load_at(dir_fd: int, directory: Path) -> tuple[Manifest | None, Manifest | None]:
    """Return the committed and the prepared manifest in the open directory `dir_fd`, as `load` does. `directory`: the
    directory's path, for errors. Raises StoreError."""
    current = None
    with suppress(FileNotFoundError):
        current = _read(dir_fd, directory / MANIFEST_NAME)
    try:
        return current, _read(dir_fd, directory / NEXT_NAME)
    except (OSError, StoreError):
        return current, None


def _read(dir_fd: int, path: Path) -> Manifest:
    """Read one manifest. Raises FileNotFoundError, StoreError."""
    try:
        data = read_file(path.name, dir_fd, most_nbytes=MOST_NBYTES)
    except FileNotFoundError:
        raise
    except (OSError, StoreError) as error:
        raise StoreError(f"{path} cannot be read: {error_text(error)}.") from error
    return Manifest.decode(data, path)
