"""Read records back from their data files, verified: of a tag, and of the newest commit of a swap directory.

By windows of whole checksummed ranges, each to one of a few buffers; one thread compares checksums while the caller
takes what was compared, and the next are read. To read to where the bytes go in the end would save that copy, but takes
0.72 s for 1.6 GB, where buffers, which stay in the processor's cache, take 0.59 (fio, with 16 MiB of them: 0.52).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

from tiered_zero.concurrency.transfer import SharedWork, Worker, wait_all, wait_quietly
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.io.engine import IOEngine, IOSettings, IOTransfer
from tiered_zero.io.select import select_reader
from tiered_zero.sizes import MIB
from tiered_zero.store import manifest
from tiered_zero.store.manifest import Contents, Manifest
from tiered_zero.store.ranges import Span, first_gap, locate, mismatches
from tiered_zero.store.stripes import DATA_NAME, StripedFiles, Stripes, check_data_files
from tiered_zero.system.resources import map_memory

BUFFER_NBYTES: Final = 2 * MIB
NUM_BUFFERS: Final = 12
"""24 MiB, most of which are on their way at any time. A load took 11% longer with 8, and 9% with 16."""

_READ_BLOCKS: Final = IOSettings(block_size=MIB)
"""Windows come in order, and wait for a late block: with 4 MiB, which suits training, a load ends later."""

_ATTEMPTS: Final = 3


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


@final
@dataclass(eq=False, kw_only=True)
class _Window:
    """A span of a record that is queued, read or kept. `wanted`: who takes a part of it. `broken`: ranges that are not
    as written, once it is verified."""

    store: int
    name: str
    span: Span
    wanted: list[tuple[Reading, Wanted]] = field(default_factory=list)
    buffer: memoryview | None = None
    verified: SharedWork | None = None
    broken: list[Broken] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.store, self.span.address

    def give(self, reading: Reading, one: Wanted) -> None:
        """Let one take its part of the window, which was verified."""
        assert self.buffer is not None, "it was read"
        start, stop = max(self.span.start, one.start), min(self.span.end, one.stop)
        one.take(start - one.start, self.buffer[start - self.span.start : stop - self.span.start])
        reading.num_left -= 1


@final
class RecordReader:
    """Reads the records of several stores. One thread drives it; `close` ends it."""

    def __init__(self, stores: Sequence[RecordFiles], engine: IOEngine | None = None) -> None:
        """`engine`: None: one that is chosen by reading the files, when there is something to read."""
        self._stores = stores
        self._stripes = [Stripes(store.contents.weights) for store in stores]
        self._records = [{record.name: record for record in store.contents.records} for store in stores]
        self._spans: dict[tuple[int, str], list[Span]] = {}
        self._engine, self._own_engine = engine, engine is None
        self._files: dict[int, StripedFiles] = {}
        self._worker: Worker | None = None
        self._free: list[memoryview] = []
        self._queued: deque[_Window] = deque()
        self._begun: deque[_Window] = deque()
        self._kept: dict[tuple[int, int], _Window] = {}
        """Windows that were taken and still have their buffers: neighbours may be wanted next. Oldest first."""
        self._windows: dict[tuple[int, int], _Window] = {}
        """All that are queued or begun."""

    def extent_nbytes(self, store: int, name: str) -> int:
        """Bytes of a record. Raises ValueError if there is none."""
        if not 0 <= store < len(self._stores) or name not in self._records[store]:
            raise ValueError(f"there is no record {name[:80]!a}")
        return self._records[store][name].extent_nbytes

    def has(self, store: int, name: str, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) of a record were written."""
        return first_gap(self._overlapping(store, name, start, stop), start, stop) is None

    def submit(self, wanted: Iterable[Wanted]) -> Reading:
        """Begin to read, in the order of the files. Raises TransferError, and StoreError for bytes that were not
        written."""
        reading = Reading()
        found: list[tuple[tuple[int, int], Span, Wanted]] = []
        for one in wanted:
            spans = self._overlapping(one.store, one.name, one.start, one.stop)
            if first_gap(spans, one.start, one.stop) is not None:
                raise StoreError(f"Record {one.name!r} does not have the bytes {one.start} to {one.stop}.")
            found += [((one.store, span.address), span, one) for span in spans]
        reading.num_left = len(found)
        for key, span, one in sorted(found, key=itemgetter(0)):
            if (kept := self._kept.get(key)) is not None:
                kept.give(reading, one)
            else:
                self._queue(one.store, one.name, span).wanted.append((reading, one))
        self._read_ahead()
        return reading

    def wait(self, reading: Reading) -> None:
        """Return when everything of it was taken; what was submitted before it is taken too. Raises CorruptionError for
        bytes that are not those written, and TransferError."""
        while reading.num_left:
            if broken := self._take_next():
                raise CorruptionError(f"{broken[0]}. Check the disk, and load another checkpoint, into a new engine.")

    def damage(self) -> list[Broken]:
        """Read all records; return the ranges that are not as written, and where a store cannot be read on."""
        found: list[Broken] = []
        for number, store in enumerate(self._stores):
            try:
                for record in store.contents.records:
                    for span in self._overlapping(number, record.name, 0, record.extent_nbytes):
                        self._queue(number, record.name, span)
                        self._read_ahead()
                        while len(self._windows) >= NUM_BUFFERS:
                            found += self._take_next()
                while self._windows:
                    found += self._take_next()
            except OSError as error:
                window = (self._begun or self._queued)[0]
                nbytes = window.span.end - window.span.start
                found.append(self._broken(window, window.span.start, nbytes, f"cannot be read: {error}"))
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

    def _overlapping(self, store: int, name: str, start: int, stop: int) -> list[Span]:
        """The spans with bytes of [start, stop), in order: each as many ranges as a buffer holds."""
        if (spans := self._spans.get((store, name))) is None:
            record, ranges = self._records[store][name], self._stores[store].contents.ranges[name]
            spans = locate(record, ranges, 0, record.extent_nbytes, BUFFER_NBYTES)
            if (nbytes := max((span.end - span.start for span in spans), default=0)) > BUFFER_NBYTES:
                raise StoreError(f"Record {name[:80]!a}: {nbytes} bytes have one checksum; expected at most 2 MiB.")
            self._spans[store, name] = spans
        first = bisect_right(spans, start, key=attrgetter("end"))
        return spans[first : bisect_left(spans, stop, lo=first, key=attrgetter("start"))]

    def _queue(self, store: int, name: str, span: Span) -> _Window:
        """Return the window of a span, which is read once there is a buffer."""
        window = _Window(store=store, name=name, span=span)
        if (queued := self._windows.setdefault(window.key, window)) is window:
            self._queued.append(window)
        return queued

    def _take_next(self) -> list[Broken]:
        """Hand out the bytes of the oldest window, unless something is wrong with them, which is returned."""
        window = self._begun[0]
        assert window.verified is not None and window.buffer is not None, "it is being read"
        window.verified.wait()
        self._begun.popleft()
        del self._windows[window.key]
        if window.broken:
            self._free.append(window.buffer)
        else:
            self._kept[window.key] = window
            for reading, one in window.wanted:
                window.give(reading, one)
            window.wanted.clear()
        self._read_ahead()
        return window.broken

    def _read_ahead(self) -> None:
        """Read the windows that are queued, as far as there are buffers."""
        if self._queued and self._worker is None:
            memory = memoryview(map_memory(NUM_BUFFERS * BUFFER_NBYTES, "MADV_DONTFORK", "MADV_HUGEPAGE"))
            self._free = [memory[start : start + BUFFER_NBYTES] for start in range(0, len(memory), BUFFER_NBYTES)]
            self._worker = Worker("tiered-zero-checkpoint-verify")
        while self._queued and (self._free or self._kept):
            if not self._free:
                oldest = self._kept.pop(next(iter(self._kept)))
                assert oldest.buffer is not None, "it was read"
                self._free.append(oldest.buffer)
            self._read(self._queued[0], self._free[-1])
            self._begun.append(self._queued.popleft())
            self._free.pop()

    def _read(self, window: _Window, buffer: memoryview) -> None:
        store, span = window.store, window.span
        if self._engine is None:
            paths = (path for each in self._stores if each.contents.capacity_nbytes for path in each.paths)
            self._engine = select_reader(*paths, settings=_READ_BLOCKS).engine
        if store not in self._files:
            stripes, names = self._stripes[store], self._stores[store].paths
            self._files[store] = StripedFiles.open(self._engine, names, stripes, writable=False)
        memory, parts = buffer[: span.end - span.start], list[IOTransfer]()

        def verify() -> None:
            wait_all(parts)  # then the memory is not used any more, whatever was raised
            for item, found in mismatches(span.checks, memory, span.start):
                expected = "none" if item.digest is None else f"{item.digest:016x}"
                reason = f"are not those written (xxh3 {expected} expected, {found:016x} found)"
                window.broken.append(self._broken(window, item.start, item.end - item.start, reason))

        self._files[store].submit(self._engine.read, span.address, memory, parts)
        window.buffer, window.verified = buffer, SharedWork(verify)
        assert self._worker is not None, "made with the buffers"
        self._worker.submit(window.verified.run)

    def _broken(self, window: _Window, start: int, nbytes: int, reason: str) -> Broken:
        """Say what was found of the bytes from `start` of the window's record on."""
        at, store = window.span.address + start - window.span.start, window.store
        path, offset = self._stripes[store].locate(self._stores[store].paths, at)
        return Broken(record=window.name, path=path, offset=offset, nbytes=nbytes, reason=reason)


# -- a whole run -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Verified:
    """The outcome for one run."""

    step: int
    num_records: int
    nbytes: int
    broken: list[Broken]


def verify_run(
    paths: Sequence[Path], step: int | None = None, metadata: Mapping[str, Any] = MappingProxyType({})
) -> Verified | None:
    """Check the committed state of the run in `paths`; None if it has none. A live run may commit at the same time.

    `step`, `metadata`: see `SwapStore.recover`; the state may be one that is only prepared, and that another store has
    decided. What was found counts if the manifest is the same at the end, for extents that it names are not rewritten
    before. Raises StoreError for a damaged manifest, and for a data file that is missing or cut off.
    """
    for _ in range(_ATTEMPTS):
        if (state := _find_state(paths[0], step, metadata)) is None:
            return None
        check_data_files(paths, Stripes(state.weights), state.capacity_nbytes)
        reader = RecordReader([RecordFiles(paths=[path / DATA_NAME for path in paths], contents=state)])
        try:
            broken = reader.damage()
        finally:
            reader.close()
        if _find_state(paths[0], step, metadata) == state:
            nbytes = sum(item.end - item.start for ranges in state.ranges.values() for item in ranges)
            return Verified(step=state.step, num_records=len(state.records), nbytes=nbytes, broken=broken)
    raise StoreError(f"{paths[0]} commits faster than it can be read; verify it when its run has ended.")


def _find_state(path: Path, step: int | None, metadata: Mapping[str, Any]) -> Manifest | None:
    committed, prepared = manifest.load(path)
    states = (committed,) if step is None else (committed, prepared)
    return next((state for state in states if state is not None and state.is_state(step, metadata)), None)
