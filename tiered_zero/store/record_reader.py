"""Read records back from their data files, verified: of a tag, and of the newest commit of a swap directory.

By windows of whole checksummed ranges, each to one of a few buffers; one thread compares checksums while the caller
takes what was compared, and the next are read. To read to where the bytes go in the end would save that copy, but takes
0.72 s for 1.6 GB, where buffers, which stay in the processor's cache, take 0.59 (fio, with 16 MiB of them: 0.52).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple, final

from tiered_zero.concurrency.transfer import Transfer, wait_all, wait_quietly
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.io.engine import File, IOEngine, IOSettings
from tiered_zero.io.select import select_reader
from tiered_zero.sizes import MIB
from tiered_zero.store.checksums import digest
from tiered_zero.store.manifest import Contents
from tiered_zero.store.stripes import Stripes
from tiered_zero.store.transfers import Once, Worker
from tiered_zero.system.mappings import map_memory

BUFFER_NBYTES: Final = 2 * MIB
NUM_BUFFERS: Final = 12
"""24 MiB, most of which are on their way at any time. A load took 11% longer with 8, and 9% with 16."""

_READ_BLOCKS: Final = IOSettings(block_size=MIB)
"""Windows come in order, and wait for a late block: with 4 MiB, which suits training, a load ends later."""


@final
@dataclass(frozen=True, kw_only=True)
class RecordFiles:
    """The records of one store, and its data files, which were checked against them."""

    paths: Sequence[Path]
    contents: Contents


class Wanted(NamedTuple):
    """Bytes `[start, stop)` of the record `name` of the store number `store`. `take(at, memory)` gets them in parts:
    those from `start + at` on, in memory that is lent to it."""

    store: int
    name: str
    start: int
    stop: int
    take: Callable[[int, memoryview], None]


@final
@dataclass(eq=False, kw_only=True)
class Reading:
    """The requests submitted at once. `num_left`: parts that are not taken yet."""

    num_left: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class Broken:
    """`nbytes` of `record`, at `offset` of `path`, cannot be trusted. `reason`: what was found."""

    record: str
    path: str
    offset: int
    nbytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.record}: {self.nbytes} bytes at offset {self.offset} of {self.path} {self.reason}"


class _Span(NamedTuple):
    """Bytes `[start, stop)` of a record, at `address` of the store. `checks`: (length, checksum) of its ranges."""

    store: int
    record: str
    address: int
    start: int
    stop: int
    checks: tuple[tuple[int, int | None], ...]


@final
@dataclass(eq=False, kw_only=True)
class _Window:
    """A span that is queued, read or kept. `wanted`: who takes a part of it."""

    span: _Span
    wanted: list[tuple[Reading, Wanted]] = field(default_factory=list)
    buffer: memoryview | None = None
    verified: _Verified | None = None


@final
class RecordReader:
    """Reads the records of several stores. One thread drives it; `close` ends it."""

    def __init__(self, stores: Sequence[RecordFiles], engine: IOEngine | None = None) -> None:
        """`engine`: None: one that is chosen by reading the files, when there is something to read."""
        self._stores = stores
        self._stripes = [Stripes(store.contents.weights) for store in stores]
        self._records = [{record.name: record for record in store.contents.records} for store in stores]
        self._spans: dict[tuple[int, str], tuple[list[_Span], list[int], list[int]]] = {}
        self._engine, self._own_engine = engine, engine is None
        self._files: dict[Path, File] = {}
        self._worker: Worker | None = None
        self._free: list[memoryview] = []
        self._queued: deque[_Window] = deque()
        self._begun: deque[_Window] = deque()
        self._kept: dict[_Span, _Window] = {}
        """Windows that were taken and still have their buffers: neighbours may be wanted next. Oldest first."""
        self._windows: dict[_Span, _Window] = {}
        """All that are queued or begun."""

    def extent_nbytes(self, store: int, name: str) -> int:
        """Bytes of a record. Raises ValueError if there is none."""
        if not 0 <= store < len(self._stores) or name not in self._records[store]:
            raise ValueError(f"there is no record {name[:80]!a}")
        return self._records[store][name].extent_nbytes

    def has(self, store: int, name: str, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) of a record were written."""
        return _covers(self._overlapping(store, name, start, stop), start, stop)

    def submit(self, wanted: Iterable[Wanted]) -> Reading:
        """Begin to read, in the order of the files. Raises TransferError, and StoreError for bytes that were not
        written."""
        reading = Reading()
        found: list[tuple[tuple[int, int], _Span, Wanted]] = []
        for one in wanted:
            spans = self._overlapping(one.store, one.name, one.start, one.stop)
            if not _covers(spans, one.start, one.stop):
                path = self._stores[one.store].paths[0]
                raise StoreError(f"{path}: record {one.name!r} does not have the bytes {one.start} to {one.stop}.")
            found += [((span.store, span.address), span, one) for span in spans]
        reading.num_left = len(found)
        for _, span, one in sorted(found, key=itemgetter(0)):
            if (kept := self._kept.get(span)) is not None:
                _give(kept, reading, one)
                continue
            if span not in self._windows:
                self._windows[span] = _Window(span=span)
                self._queued.append(self._windows[span])
            self._windows[span].wanted.append((reading, one))
        self._read_ahead()
        return reading

    def wait(self, reading: Reading) -> None:
        """Return when everything of it was taken; what was submitted before it is taken too. Raises CorruptionError for
        bytes that are not those written, and TransferError."""
        while reading.num_left:
            if problems := self._take_next():
                raise CorruptionError(f"{problems[0]}. Check the disk, and load another checkpoint, into a new engine.")

    def damage(self) -> list[Broken]:
        """Read all records; return the ranges that are not as written, and where a store cannot be read on."""
        found: list[Broken] = []
        for number, store in enumerate(self._stores):
            spans = [
                span
                for record in store.contents.records
                for span in self._overlapping(number, record.name, 0, record.extent_nbytes)
            ]
            num_taken = 0
            try:
                for span in spans:
                    self.submit([Wanted(number, span.record, span.start, span.stop, _drop)])
                    while len(self._windows) >= NUM_BUFFERS:
                        found += self._take_next()
                        num_taken += 1
                while self._windows:
                    found += self._take_next()
                    num_taken += 1
            except OSError as error:
                span = spans[num_taken]
                found.append(self._broken(span, span.start, span.stop - span.start, f"cannot be read: {error}"))
                self.close()
        return found

    def close(self) -> None:
        """Wait for what is being read, close the files. Idempotent; a later `submit` opens them again."""
        for window in self._begun:
            if window.verified is not None:
                wait_quietly(window.verified)
        for held in (self._queued, self._begun, self._kept, self._windows, self._free):
            held.clear()
        while self._files:
            self._files.popitem()[1].close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._own_engine and self._engine is not None:
            self._engine.close()
            self._engine = None

    # -- windows -------------------------------------------------------------------------------------------------------

    def _overlapping(self, store: int, name: str, start: int, stop: int) -> list[_Span]:
        """The spans with bytes of [start, stop), in order."""
        key = store, name
        if key not in self._spans:
            self._spans[key] = self._cut(store, name)
        spans, starts, stops = self._spans[key]
        return spans[bisect_right(stops, start) : bisect_left(starts, stop)]

    def _cut(self, store: int, name: str) -> tuple[list[_Span], list[int], list[int]]:
        """Join neighbouring ranges of a record, as many as a buffer holds. Returns them, their starts and stops."""
        record, spans = self._records[store][name], list[_Span]()
        for item in self._stores[store].contents.ranges[name]:
            address, nbytes = record.offsets[item.slot] + item.start, item.end - item.start
            if nbytes > BUFFER_NBYTES:
                raise StoreError(f"Record {name[:80]!a}: {nbytes} bytes have one checksum; expected at most 2 MiB.")
            last = spans[-1] if spans else None
            if (
                last is not None
                and (last.stop, last.address + last.stop - last.start) == (item.start, address)
                and item.end - last.start <= BUFFER_NBYTES
            ):
                spans[-1] = last._replace(stop=item.end, checks=(*last.checks, (nbytes, item.digest)))
            else:
                spans.append(_Span(store, name, address, item.start, item.end, ((nbytes, item.digest),)))
        return spans, [span.start for span in spans], [span.stop for span in spans]

    def _take_next(self) -> list[Broken]:
        """Hand out the bytes of the oldest window, unless something is wrong with them, which is returned."""
        window = self._begun[0]
        assert window.verified is not None and window.buffer is not None, "it is being read"
        window.verified.wait()
        self._begun.popleft()
        del self._windows[window.span]
        problems = window.verified.problems
        if problems:
            self._free.append(window.buffer)
        else:
            self._kept[window.span] = window
            for reading, one in window.wanted:
                _give(window, reading, one)
            window.wanted.clear()
        self._read_ahead()
        return problems

    def _read_ahead(self) -> None:
        """Read the windows that are queued, as far as there are buffers."""
        if self._queued and self._worker is None:
            memory = memoryview(map_memory(NUM_BUFFERS * BUFFER_NBYTES, "MADV_DONTFORK", "MADV_HUGEPAGE"))
            starts = range(0, len(memory), BUFFER_NBYTES)
            self._free, self._worker = (
                [memory[start : start + BUFFER_NBYTES] for start in starts],
                Worker("tiered-zero-checkpoint-verify"),
            )
        while self._queued and (self._free or self._kept):
            if not self._free:
                oldest = self._kept.pop(next(iter(self._kept)))
                assert oldest.buffer is not None, "it was read"
                self._free.append(oldest.buffer)
            window = self._queued[0]
            self._read(window, self._free[-1])
            self._queued.popleft()
            self._free.pop()
            self._begun.append(window)

    def _read(self, window: _Window, buffer: memoryview) -> None:
        span = window.span
        if self._engine is None:
            paths = (path for store in self._stores if store.contents.capacity_nbytes for path in store.paths)
            self._engine = select_reader(*paths, settings=_READ_BLOCKS).engine
        memory, parts, at = buffer[: span.stop - span.start], list[Transfer](), 0
        for index, offset, nbytes in self._stripes[span.store].pieces(span.address, len(memory)):
            path = self._stores[span.store].paths[index]
            if path not in self._files:
                self._files[path] = self._engine.open(str(path), writable=False)
            parts.append(self._engine.read(self._files[path], offset, memory[at : at + nbytes]))
            at += nbytes
        window.buffer, window.verified = buffer, _Verified(span, memory, parts, self._broken)
        assert self._worker is not None, "made with the buffers"
        self._worker.submit(window.verified.run)

    def _broken(self, span: _Span, start: int, nbytes: int, reason: str) -> Broken:
        """Say what was found of the bytes from `start` of the span's record on."""
        piece = next(self._stripes[span.store].pieces(span.address + start - span.start, 1))
        path = str(self._stores[span.store].paths[piece.file_index])
        return Broken(record=span.record, path=path, offset=piece.file_offset, nbytes=nbytes, reason=reason)


def _covers(spans: Sequence[_Span], start: int, stop: int) -> bool:
    """Whether spans, in order, have all bytes of [start, stop)."""
    for span in spans:
        if span.start > start:
            return False
        start = span.stop
    return start >= stop


def _give(window: _Window, reading: Reading, one: Wanted) -> None:
    """Let one take its part of a window that was verified."""
    span = window.span
    start, stop = max(span.start, one.start), min(span.stop, one.stop)
    assert window.buffer is not None, "it was read"
    one.take(start - one.start, window.buffer[start - span.start : stop - span.start])
    reading.num_left -= 1


def _drop(at: int, memory: memoryview) -> None:
    """Take what is only to be verified."""


@final
class _Verified(Once):
    """A window that is being read and compared: on the worker, or by the first wait, should that come before it.

    `problems`: ranges that are not as written, once it is done."""

    def __init__(
        self,
        span: _Span,
        memory: memoryview,
        parts: Sequence[Transfer],
        broken: Callable[[_Span, int, int, str], Broken],
    ) -> None:
        super().__init__(self._compare)
        self.problems: list[Broken] = []
        self._span, self._memory, self._parts, self._broken = span, memory, parts, broken

    def _compare(self) -> None:
        """Wait for the bytes, compare their checksums."""
        wait_all(self._parts)  # then the memory is not used any more, whatever was raised
        problems, at = [], 0
        for nbytes, expected in self._span.checks:
            if (found := digest(self._memory[at : at + nbytes])) != expected:
                wanted = "none" if expected is None else f"{expected:016x}"
                reason = f"are not those written (xxh3 {wanted} expected, {found:016x} found)"
                problems.append(self._broken(self._span, self._span.start + at, nbytes, reason))
            at += nbytes
        self.problems = problems
