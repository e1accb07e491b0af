"""Track a store's records: where they are, which bytes are written and durable, and the requests under way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from tiered_zero.errors import StoreError
from tiered_zero.layout.extents import ExtentMap
from tiered_zero.record.manifest import Range, Record
from tiered_zero.record.reader import RangeMap, Span, cut, first_gap, join, locate, other_slots
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes

Written = tuple[Record, Sequence[Range]]


@final
@dataclass(eq=False, kw_only=True)
class InFlight:
    """One request for bytes `[start, end)` of a record, until `RecordTable.end`; compared by identity."""

    kind: Literal["read", "write"]
    start: int
    end: int

    def __repr__(self) -> str:
        return f"a {self.kind} of bytes {self.start} to {self.end}"


@final
@dataclass(kw_only=True)
class _State:
    """The state of a record. `written`: the ranges that were written last. `durable`: the ranges in the durable
    manifest; None if it does not name the record. `in_flight`: requests under way."""

    record: Record
    written: RangeMap = field(default_factory=RangeMap)
    durable: RangeMap | None = None
    in_flight: list[InFlight] = field(default_factory=list)


@final
class RecordTable:
    """Keeps account of a store's records; moves no bytes. A lock guards it: requests begin on the thread that drives
    the store and end on any. It keeps the rule that makes commits safe: a write never goes to an extent (a range of the
    files) that the durable manifest names."""

    def __init__(self, capacity_nbytes: int) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._extents = ExtentMap(capacity_nbytes)
        self._frozen: int | None = None

    @property
    def capacity_nbytes(self) -> int:
        """The size of the data files, in whole pages."""
        return self._extents.capacity_nbytes

    def records(self) -> dict[str, Record]:
        with self._lock:
            return {name: state.record for name, state in self._states.items()}

    def reserve(self, name: str, nbytes: int, *, committed: bool, num_slots: int) -> Record:
        """Reserve extents for a new record, one for each slot. Raises StoreError if `nbytes` is not positive, the name
        is taken, or the capacity is used up."""
        if nbytes <= 0:
            raise StoreError(f"Record {name!r} must have at least one byte; found {nbytes}.")
        with self._lock:
            if name in self._states:
                raise StoreError(f"The store has a record {name!r} already; release it first, or choose another name.")
            offsets: list[int] = []
            for _ in range(num_slots):
                if (offset := self._extents.allocate(nbytes)) is None:
                    for taken in offsets:
                        self._extents.free(taken, nbytes)
                    raise StoreError(
                        f"Record {name!r} needs {format_nbytes(nbytes)} ({align_up(nbytes, PAGE_NBYTES)} bytes) in one "
                        f"piece{', twice' * (num_slots > 1)}; {self._extents.describe()}. Create the store with a "
                        "larger capacity."
                    )
                offsets.append(offset)
            record = Record(name=name, nbytes=nbytes, committed=committed, offsets=tuple(offsets))
            self._states[name] = _State(record=record)
        return record

    def adopt(self, written: Iterable[Written]) -> None:
        """Add the records of a durable manifest, with their written ranges. Raises StoreError."""
        for record, ranges in written:
            for offset in record.offsets:
                try:
                    self._extents.claim(offset, record.nbytes)
                except ValueError as error:
                    raise StoreError(f"Record {record.name!r}: {error}") from error
            self._states[record.name] = _State(record=record, written=RangeMap(ranges), durable=RangeMap(ranges))

    def num_slots(self, record: Record) -> int:
        with self._lock:
            return len(self._find(record).record.offsets)

    def kept(self, record: Record, start: int, end: int) -> list[Range]:
        """Return the ranges of the last commit that a write of the bytes `[start, end)` would change, because the
        record has no second slot."""
        with self._lock:
            state = self._find(record)
            if not state.record.committed or len(state.record.offsets) > 1 or state.durable is None:
                return []
            return state.durable.overlapping(start, end)

    def add_slot(self, record: Record) -> bool:
        """Give the record its second slot, if it has one only. Return False if no free extent is large enough."""
        with self._lock:
            state = self._find(record)
            if len(state.record.offsets) == 1 and (offset := self._extents.allocate(record.nbytes)) is not None:
                state.record = state.record.model_copy(update={"offsets": (*state.record.offsets, offset)})
            return len(state.record.offsets) > 1

    def grow(self, capacity_nbytes: int) -> None:
        """Set the capacity, after the caller has made the files larger."""
        with self._lock:
            self._extents.grow(capacity_nbytes)

    def begin_read(self, record: Record, request: InFlight) -> list[Span]:
        """Register a read, and return where its bytes lie. Raises StoreError if these bytes may not be read now."""
        start, end = request.start, request.end
        with self._lock:
            state = self._admit(record, request)
            ranges = state.written.overlapping(start, end)
            if (missing := first_gap(ranges, start, end)) is not None:
                raise StoreError(
                    f"Record {record.name!r}: the bytes from {missing} on were never written; write them first."
                )
            state.in_flight.append(request)
            return locate(state.record, ranges, start, end)

    def begin_write(self, record: Record, request: InFlight) -> tuple[list[Span], list[Range]]:
        """Register a write. Return where its bytes must go, and the pieces of them that get a checksum each. Raises
        StoreError if these bytes may not be written now."""
        start, end = request.start, request.end
        with self._lock:
            state = self._admit(record, request)
            self._refuse_while_frozen(record)
            state.in_flight.append(request)
            runs = join(other_slots(state.durable.overlapping(start, end) if state.durable else (), start, end))
            return locate(state.record, runs, start, end), [piece for run in runs for piece in cut(run)]

    def end(self, record: Record, request: InFlight, written: Sequence[Range] = ()) -> None:
        """Remove a request that has ended or did not begin. `written`: after a successful write, the ranges that tile
        its bytes."""
        with self._lock:
            state = self._states.get(record.name)
            if state is None or request not in state.in_flight:
                return
            if written:
                state.written.replace(request.start, request.end, written)
            state.in_flight.remove(request)

    def end_all(self) -> None:
        """Remove all requests. The caller knows that none is under way."""
        with self._lock:
            for state in self._states.values():
                state.in_flight = []

    def freeze(self, step: int) -> list[Written]:
        """Return the committed records, each with its written ranges, and refuse writes to them until `thaw`. Raises
        StoreError while one of them is being written, or if they are frozen already."""
        with self._lock:
            if self._frozen is not None:
                raise StoreError(f"Step {self._frozen} is prepared; confirm it before the next one.")
            states = [state for state in self._states.values() if state.record.committed]
            busy = [state.record.name for state in states if any(one.kind == "write" for one in state.in_flight)]
            if busy:
                raise StoreError(
                    f"Cannot commit while records are being written ({busy[:5]}); wait for their transfers."
                )
            self._frozen = step
            return [(state.record, list(state.written)) for state in states]

    def durable(self, record: Record, start: int, end: int) -> list[Range]:
        """Return the ranges that the durable manifest names and that overlap these bytes, untrimmed."""
        with self._lock:
            durable = self._find(record).durable
            return [] if durable is None else durable.overlapping(start, end)

    def set_written(self, record: Record, ranges: Sequence[Range]) -> None:
        """Set the ranges of a frozen record: the same bytes as before, now with checksums."""
        with self._lock:
            self._find(record).written = RangeMap(ranges)

    def thaw(self, durable: Mapping[str, Sequence[Range]] | None) -> None:
        """Allow writes again. `durable`: the ranges of each record in the new durable manifest; None: there is no new
        one."""
        with self._lock:
            self._frozen = None
            if durable is None:
                return
            for name, ranges in durable.items():
                self._states[name].durable = RangeMap(ranges)

    def revert(self) -> None:
        """Return the committed records to the last commit; records that the commit does not name become empty. Scratch
        records do not change. Raises StoreError while a committed record is in use or prepared."""
        with self._lock:
            states = [state for state in self._states.values() if state.record.committed]
            for state in states:
                self._refuse_while_frozen(state.record)
                if state.in_flight:
                    raise StoreError(f"Record {state.record.name!r} is still in use by {state.in_flight}; wait for it.")
            for state in states:
                state.written = RangeMap(state.durable or ())

    def _admit(self, record: Record, request: InFlight) -> _State:
        kind, start, end = request.kind, request.start, request.end
        state = self._find(record)
        if start % PAGE_NBYTES or end % PAGE_NBYTES or not 0 <= start < end <= record.extent_nbytes:
            raise StoreError(
                f"Record {record.name!r} holds {record.extent_nbytes} bytes in whole pages of {PAGE_NBYTES}; "
                f"a {kind} of bytes {start} to {end} is not inside of it or not in whole pages."
            )
        for other in state.in_flight:
            if other.start < end and start < other.end and "write" in (kind, other.kind):
                raise StoreError(
                    f"Record {record.name!r}: {request} overlaps {other} that is still in flight; wait for it first."
                )
        return state

    def _find(self, record: Record) -> _State:
        if (state := self._states.get(record.name)) is None:
            raise StoreError(f"The store has no record {record.name!r}; reserve it first.")
        return state

    def _refuse_while_frozen(self, record: Record) -> None:
        if self._frozen is not None and record.committed:
            raise StoreError(f"Record {record.name!r} must rest: step {self._frozen} is prepared; confirm it first.")
