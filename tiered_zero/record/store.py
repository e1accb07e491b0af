"""Store records in preallocated files, with checked reads and writes and all-or-nothing commits."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, final

from tiered_zero.concurrency.transfer import (
    COMPLETED,
    FailureLatch,
    SharedWork,
    Transfer,
    Worker,
    wait_all,
    wait_quietly,
)
from tiered_zero.errors import CorruptionError, StoreError, TransferError
from tiered_zero.io.engine import IOEngine, IOTransfer
from tiered_zero.layout.extents import ExtentMap
from tiered_zero.record.data_files import DATA_NAME, PieceRequest, StripedFiles, Stripes, check_data_files
from tiered_zero.record.directory import SwapDir
from tiered_zero.record.files import confirm_file, discard_file, prepare_file, sync_directory
from tiered_zero.record.manifest import (
    MANIFEST_NAME,
    Manifest,
    Range,
    RangeMap,
    Record,
    Span,
    choose,
    cut,
    first_gap,
    hashed,
    is_same,
    join,
    locate,
    mismatches,
    other_slots,
)
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.system import OwnProcess, map_memory
from tiered_zero.telemetry.spans import Recorder

_TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errnos of a failed manifest write. After one of these the caller may retry the commit."""

_STUCK_S = 5.0
"""The longest time in seconds for which `close` and `drain_all` wait after a failure. A request may be stuck for
ever."""


@final
class SwapStore:
    """Stores named records on NVMe. One thread drives the store; any thread may wait for its transfers.

    A request is refused if it overlaps another request in flight for the same record, unless both are reads. A failed
    transfer or sync latches the store: every later call raises."""

    def __init__(
        self,
        directory: SwapDir,
        engine: IOEngine,
        *,
        capacity_nbytes: int,
        checksums: Literal["all", "off"] = "all",
        weights: Sequence[float] = (),
        state: Manifest | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Create the data files, and reserve `capacity_nbytes` of disk space in total, rounded up to whole pages.
        `weights`: the speed of each path, in any unit; equal by default. `state`: open existing files that this
        manifest describes (see `recover`). Raises StoreError if the disk is too small; the directory is then
        removed."""
        self._is_hashed = checksums == "all"
        stripes = Stripes(weights or (state.weights if state is not None else [1.0] * len(directory.paths)))
        names = [path / DATA_NAME for path in directory.paths]
        self._process = OwnProcess("swap store", StoreError)
        self._directory = directory
        self._manifest = directory.paths[0] / MANIFEST_NAME
        self._table = RecordTable(capacity_nbytes)
        self._latch = FailureLatch()
        self._prepared: Manifest | None = None
        self.step = None if state is None else state.step
        """The step of the last commit; None before the first."""
        self._recorder = recorder
        self._count_lock = threading.Lock()
        self._nbytes: dict[str, Counter[str]] = {"read": Counter(), "write": Counter(), "unverified": Counter()}
        with ExitStack() as unfinished:
            if state is None:
                unfinished.callback(directory.remove)
                self._files = StripedFiles.create(engine, names, stripes, self.capacity_nbytes)
            else:
                check_data_files(directory.paths, stripes, self.capacity_nbytes)
                self._files = StripedFiles.open(engine, names, stripes)
            unfinished.callback(self._files.close)
            if state is not None:
                self._table.adopt((record, state.ranges[record.name]) for record in state.records)
            self._hashing = Worker("tiered_zero-hash")
            unfinished.callback(self._hashing.close)
            self._worker = Worker("tiered_zero-store")
            unfinished.pop_all()

    @classmethod
    def recover(
        cls,
        directory: SwapDir,
        engine: IOEngine,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] = MappingProxyType({}),
        checksums: Literal["all", "off"] = "all",
        recorder: Recorder | None = None,
    ) -> SwapStore:
        """Open the state of a run that has ended. `directory`: from `SwapDir.open`. `step`: the step of the state,
        committed or prepared; None: the last committed state. `metadata`: items that the state's metadata must have.
        Raises StoreError if there is no such state, or a file is missing or damaged."""
        first = directory.paths[0]
        chosen, is_committed = choose(first, step, metadata)
        nbytes = chosen.capacity_nbytes
        store = cls(directory, engine, capacity_nbytes=nbytes, checksums=checksums, state=chosen, recorder=recorder)
        try:
            if is_committed:
                discard_file(first / MANIFEST_NAME)
            else:
                confirm_file(first / MANIFEST_NAME)
        except Exception:
            store.close(remove=False)
            raise
        return store

    @property
    def capacity_nbytes(self) -> int:
        """The present size of all data files together, in bytes."""
        return self._table.extents.capacity_nbytes

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories of the run."""
        return tuple(map(str, self._directory.paths))

    @property
    def engine(self) -> IOEngine:
        """The engine that moves the bytes."""
        return self._files.engine

    @property
    def run_id(self) -> str:
        """The id of the run that owns the directories."""
        return self._directory.run_id

    def reserve(self, name: str, nbytes: int, *, committed: bool = False, write_once: bool = False) -> Record:
        """Reserve disk space for a new record of `nbytes`. `committed`: the record takes part in commits and gets two
        slots. `write_once`: the record gets its second slot only at the first write that would change bytes of the last
        commit. Raises StoreError if the name is taken or the capacity is used up."""
        num_slots = 2 if committed and not write_once else 1
        return self._table.reserve(name, nbytes, committed=committed, num_slots=num_slots)

    def num_slots(self, record: Record) -> int:
        """Return the number of slots that the record has on disk now."""
        return self._table.num_slots(record)

    def records(self) -> dict[str, Record]:
        """Return all records by name, for example those that `recover` has found."""
        return self._table.records()

    def nbytes(self, kind: Literal["read", "write", "unverified"]) -> dict[str, int]:
        """Return category (a record's name up to the first '/') -> bytes that completed requests have moved. `kind`:
        "unverified" counts the bytes that were read without verification."""
        with self._count_lock:
            return dict(self._nbytes[kind])

    def read(self, record: Record, into: memoryview, offset: int = 0, *, urgent: bool = False) -> Transfer:
        """Start to fill `into` with the record's bytes from `offset` on. Offset, size and address are multiples of a
        page. `urgent`: whether the I/O engine takes this read before all requests that are not urgent. Raises
        StoreError for bytes that were never written. The transfer raises TransferError, and CorruptionError if the
        bytes differ from what was written."""
        self._check()
        into = memoryview(into).cast("B")
        request = InFlight(kind="read", start=offset, end=offset + len(into))
        spans = self._table.begin_read(record, request)
        checks = [item for span in spans for item in span.checks if self._is_hashed and item.digest is not None]
        parts: list[IOTransfer] = []

        def finish() -> None:
            wait_all(parts)
            for item, found in mismatches(checks, into, offset):
                raise self._corruption(record, spans, item, found)
            verified_nbytes = sum(item.end - item.start for item in checks)
            self._count(record, read=len(into), unverified=len(into) - verified_nbytes)

        return self._start(record, request, spans, into, partial(self.engine.read, urgent=urgent), parts, finish)

    def write(self, record: Record, data: memoryview, offset: int = 0) -> Transfer:
        """Start to write `data` to the record, from its byte `offset` on. Offset, size and address are multiples of a
        page. `data` must not change until the transfer is done. A first write over committed bytes reserves a second
        slot for the record. Raises StoreError if the disk has no space for that slot. The transfer raises
        TransferError."""
        self._check()
        data = memoryview(data).cast("B")
        if kept := self._table.kept(record, offset, offset + len(data)):
            if is_same(kept, data, offset):
                return COMPLETED
            self._add_slot(record)
        request = InFlight(kind="write", start=offset, end=offset + len(data))
        spans, pieces = self._table.begin_write(record, request)
        parts: list[IOTransfer] = []

        def compute() -> None:
            if self._is_hashed:
                pieces[:] = hashed(pieces, data, offset)

        def finish() -> None:
            hashing.wait()
            wait_all(parts)
            self._table.end(record, request, pieces)
            self._count(record, write=len(data))

        hashing = SharedWork(compute)
        self._hashing.submit(hashing.run)  # its own thread: a step took 3% longer with this on `_worker`
        return self._start(record, request, spans, data, self.engine.write, parts, finish)

    def commit(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Commit all records that were reserved with `committed=True`, as the state of `step`. The state is durable on
        return. `metadata`: the caller's own values, JSON only."""
        try:
            self.prepare(step, metadata)
            self.confirm()
        except BaseException:
            if self._latch.error is None:  # a latched store may have committed: `confirm` failed
                self.cancel_prepared()
            raise

    def prepare(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Do the first half of `commit`: make the new state durable, and keep the last commit. `recover` can open
        either state. Writes to records that take part in commits are refused until `confirm` or `cancel_prepared`.
        Processes that commit together wait for each other before they call `confirm`.

        Raises StoreError if a record of the commit is being written, or if the manifest does not fit on the disk."""
        self._check()
        written = self._table.freeze(step)
        try:
            if self._is_hashed:
                written = [(record, self._hashed(record, ranges)) for record, ranges in written]
            state = Manifest(
                run_id=self.run_id,
                step=step,
                capacity_nbytes=self.capacity_nbytes,
                weights=self._files.stripes.weights,
                metadata=dict(metadata),
                records=tuple(record for record, _ in written),
                ranges={record.name: list(ranges) for record, ranges in written},
            )
            data = state.encode()
            # data is durable before the manifest that names it
            with self._latching():  # a sync is never tried again: the kernel may have dropped the pages
                wait_all(self._files.sync())
            self._directory.keep()
            prepare_file(self._manifest, data)
            sync_directory(self._manifest.parent)
        except (StoreError, ValueError):  # ValueError: the manifest would not be valid
            self._table.thaw(None)
            raise
        except OSError as error:
            if isinstance(error, TransferError):
                raise
            raise self._not_prepared(step, error) from error
        self._prepared = state

    def confirm(self) -> None:
        """Do the second half of `commit`: commit the prepared state."""
        self._check()
        state = self._prepared
        if state is None:
            raise StoreError("Nothing is prepared; call prepare first.")
        try:
            confirm_file(self._manifest)
            self._prepared = None
            self._table.thaw(state.ranges)
            self.step = state.step
        except OSError as error:
            self._latch.set(error)
            raise StoreError(f"The commit of step {state.step} failed: {error}. Resume from what is there.") from error
        except BaseException as error:  # such as a second Ctrl-C: it may be durable or not
            self._latch.set(error)
            raise

    def cancel_prepared(self) -> None:
        """Drop the prepared state, if there is one, durably. Raises StoreError."""
        if self._prepared is None:
            return
        try:
            discard_file(self._manifest)
        except OSError as error:
            self._latch.set(error)
            step = self._prepared.step
            raise StoreError(f"Step {step} cannot be dropped: {error}. Resume from what is there.") from error
        self._restore()
        self._prepared = None

    def revert(self) -> None:
        """Restore all records that take part in commits to their bytes at the last commit."""
        self._check()
        self._table.revert()

    def drain_all(self) -> None:
        """Wait for every request and ignore errors. No other thread may use the store during the call."""
        self._files.engine.drain()
        finished = threading.Event()
        self._worker.submit(finished.set)
        finished.wait(None if self._latch.error is None else _STUCK_S)
        self._table.end_all()

    def close(self, remove: bool = True) -> None:
        """Wait for the requests, close the files and remove the directory. Idempotent. `remove`: if False, keep a
        committed or prepared state on disk for `recover`."""
        if not self._process.is_current():
            return  # a forked child owns nothing
        for worker in (self._worker, self._hashing):
            worker.close(None if self._latch.error is None else _STUCK_S)
        self._files.close()
        if remove:
            self._directory.remove()
        else:
            self._directory.release()

    def _start(
        self,
        record: Record,
        request: InFlight,
        spans: Sequence[Span],
        memory: memoryview,
        act: PieceRequest,
        parts: list[IOTransfer],
        finish: Callable[[], None],
    ) -> Transfer:
        """Start one request, and return its transfer. `act`: IOEngine.read or IOEngine.write. `parts`: receives the
        transfers of all pieces. `finish`: waits for `parts`, then verifies the checksums of a read, or stores the
        checksums of a write."""
        begun_s = time.perf_counter()

        def work() -> None:
            with self._ended(record, request, parts):
                finish()
            if self._recorder is not None:
                end_s = begun_s + max(part.seconds for part in parts)
                kind, nbytes = request.kind, len(memory)
                self._recorder.add(f"disk {kind}", kind, record.name, begun_s, end_s, nbytes)

        try:
            for span in spans:
                self._files.submit(
                    act, span.address, memory[span.start - request.start : span.end - request.start], parts
                )
        except Exception:
            with self._ended(record, request, parts):
                raise
        transfer = SharedWork(work)
        self._worker.submit(transfer.run)  # finishes the request even if no caller waits for it
        return transfer

    @contextmanager
    def _ended(self, record: Record, request: InFlight, parts: Sequence[IOTransfer]) -> Iterator[None]:
        """Remove the request from the table when the `with` block ends. If the block raises an Exception, first wait
        for `parts`. After an interrupt, leave the request in the table."""
        try:
            yield
        except Exception as error:  # not an interrupt (Ctrl-C): the next thread that waits ends the request
            for part in parts:
                wait_quietly(part)
            # after a failed transfer or a begun write the bytes on disk are unknown
            if isinstance(error, TransferError) or (parts and request.kind == "write"):
                self._latch.set(error)
            self._table.end(record, request)
            raise
        self._table.end(record, request)

    def _add_slot(self, record: Record) -> None:
        """Reserve a second slot for the record. Enlarge the files if they lack space. Raises StoreError."""
        if not self._table.add_slot(record):
            capacity_nbytes = self.capacity_nbytes + record.extent_nbytes
            self._files.grow(capacity_nbytes)
            self._table.grow(capacity_nbytes)
            self._table.add_slot(record)

    def _resume_text(self) -> str:
        """Return a text that names the state from which a run can resume."""
        if self.step is None:
            return "the last checkpoint"
        path = self.paths[0]
        return (
            f"step {self.step}, committed in {path}, if `tiered-zero checkpoint verify {path}` finds it whole; else "
            "name another checkpoint"
        )

    def _restore(self) -> None:
        """Allow writes again. Called after the prepared manifest was removed."""
        self._directory.keep(self.step is not None)
        self._table.thaw(None)

    def _hashed(self, record: Record, ranges: Sequence[Range]) -> Sequence[Range]:
        """Return `ranges`; compute missing checksums from the bytes on disk. Raises TransferError, CorruptionError."""
        if all(item.digest is not None for item in ranges):
            return ranges
        with self._latching():
            found = [item if item.digest is not None else self._with_digest(record, item) for item in ranges]
        self._table.set_written(record, found)
        return found

    def _with_digest(self, record: Record, item: Range) -> Range:
        """Read the range `item`, and return it with its checksum. Raises TransferError, CorruptionError."""
        durable = self._table.durable(record, item.start, item.end)
        # part of a range of the last commit: read and verify all of that range
        whole = next((one for one in durable if one.slot == item.slot and one.digest is not None), item)
        (span,) = locate(record, [whole], whole.start, whole.end)
        memory, parts = memoryview(map_memory(whole.end - whole.start)), list[IOTransfer]()
        self._files.submit(self._files.engine.read, span.address, memory, parts)
        wait_all(parts)
        if whole.digest is not None and any(mismatches([whole], memory, whole.start)):
            raise CorruptionError(
                f"Record {record.name!r}: bytes {whole.start} to {whole.end} are not those written. Check the disk and "
                f"resume from {self._resume_text()}."
            )
        return hashed([item], memory, whole.start)[0]

    @contextmanager
    def _latching(self) -> Iterator[None]:
        """Return a context manager that latches the store if its block raises."""
        try:
            yield
        except Exception as error:
            self._latch.set(error)
            raise

    def _not_prepared(self, step: int, error: OSError) -> StoreError:
        """Return the error to raise when the manifest of `step` could not be written. If `error` is transient
        (`_TRANSIENT`), drop the prepared state. Else latch the store, which then refuses all use."""
        text = (
            f"The manifest of step {step} cannot be written to {self._directory.paths[0]}: {error}. "
            "What was committed before is untouched"
        )
        if error.errno in _TRANSIENT:
            with suppress(OSError):
                discard_file(self._manifest)  # durably, because its extents will be written again
                self._restore()
                return StoreError(f"{text}; free some space (or file descriptors) and commit again.")
        self._latch.set(error)
        return StoreError(f"{text}; resume from {self._resume_text()}.")

    def _corruption(self, record: Record, spans: Sequence[Span], item: Range, found: int) -> CorruptionError:
        span = next(span for span in spans if span.start <= item.start < span.end)
        path, at = self._files.locate(span.address + item.start - span.start)
        return CorruptionError(
            f"Record {record.name!r}: bytes {item.start} to {item.end}, read from {path} at offset {at}, are not those "
            f"written (xxh3 {item.digest:016x} expected, {found:016x} found). Nothing was updated from them. Check the "
            f"disk and resume from {self._resume_text()}."
        )

    def _count(self, record: Record, **nbytes: int) -> None:
        category = record.name.partition("/")[0]
        with self._count_lock:
            for kind, more in nbytes.items():
                self._nbytes[kind][category] += more

    def _check(self) -> None:
        self._process.check()
        self._latch.check(
            lambda error: (
                "The swap store failed earlier and cannot be trusted any more: "
                f"{error} Resume from {self._resume_text()}."
            )
        )


# -- the table of a store's records ------------------------------------------------------------------------------------

Written = tuple[Record, Sequence[Range]]


@final
@dataclass(eq=False, kw_only=True)
class InFlight:
    """A request in flight for the bytes `[start, end)` of a record. Compared by identity."""

    kind: Literal["read", "write"]
    start: int
    end: int

    def __repr__(self) -> str:
        return f"a {self.kind} of bytes {self.start} to {self.end}"


@final
@dataclass(kw_only=True)
class _State:
    """The state of a record. `written`: the ranges that hold its newest bytes. `durable`: its ranges in the durable
    manifest; None if the manifest does not have the record."""

    record: Record
    written: RangeMap = field(default_factory=RangeMap)
    durable: RangeMap | None = None
    in_flight: list[InFlight] = field(default_factory=list)


@final
class RecordTable:
    """Keeps the table of a store's records: slots, written ranges, requests in flight. Any thread may use it. A write
    never overwrites bytes of the last commit. So this commit stays whole until the next commit is durable."""

    def __init__(self, capacity_nbytes: int) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self.extents = ExtentMap(capacity_nbytes)
        self._frozen: int | None = None

    def records(self) -> dict[str, Record]:
        with self._lock:
            return {name: state.record for name, state in self._states.items()}

    def reserve(self, name: str, nbytes: int, *, committed: bool, num_slots: int) -> Record:
        """Reserve an extent for each slot of a new record. `committed`: whether the record takes part in commits.
        Raises StoreError if the name is taken or the capacity is used up."""
        if nbytes <= 0:
            raise StoreError(f"Record {name!r} must have at least one byte; found {nbytes}.")
        with self._lock:
            if name in self._states:
                raise StoreError(f"The store has a record {name!r} already; release it first, or choose another name.")
            offsets: list[int] = []
            for _ in range(num_slots):
                if (offset := self.extents.allocate(nbytes)) is None:
                    for taken in offsets:
                        self.extents.free(taken, nbytes)
                    raise StoreError(
                        f"Record {name!r} needs {format_nbytes(nbytes)} ({align_up(nbytes, PAGE_NBYTES)} bytes) in one "
                        f"piece{', twice' * (num_slots > 1)}; {self.extents.describe()}. Create the store with a "
                        "larger capacity."
                    )
                offsets.append(offset)
            record = Record(name=name, nbytes=nbytes, committed=committed, offsets=tuple(offsets))
            self._states[name] = _State(record=record)
        return record

    def adopt(self, written: Iterable[Written]) -> None:
        """Add the records of a durable manifest, each with its written ranges. Raises StoreError."""
        for record, ranges in written:
            for offset in record.offsets:
                self.extents.claim(offset, record.nbytes)
            self._states[record.name] = _State(record=record, written=RangeMap(ranges), durable=RangeMap(ranges))

    def num_slots(self, record: Record) -> int:
        with self._lock:
            return len(self._find(record).record.offsets)

    def kept(self, record: Record, start: int, end: int) -> list[Range]:
        """Return the committed ranges that a write of `[start, end)` would overwrite. For a record with two slots
        return [], because the write goes to the other slot."""
        with self._lock:
            state = self._find(record)
            if not state.record.committed or len(state.record.offsets) > 1 or state.durable is None:
                return []
            return state.durable.overlapping(start, end)

    def add_slot(self, record: Record) -> bool:
        """Reserve a second slot if the record has only one. Return False if no free extent is large enough."""
        with self._lock:
            state = self._find(record)
            if len(state.record.offsets) == 1 and (offset := self.extents.allocate(record.nbytes)) is not None:
                state.record = state.record.model_copy(update={"offsets": (*state.record.offsets, offset)})
            return len(state.record.offsets) > 1

    def grow(self, capacity_nbytes: int) -> None:
        """Raise the capacity to `capacity_nbytes`. The caller has already enlarged the files."""
        with self._lock:
            self.extents.grow(capacity_nbytes)

    def begin_read(self, record: Record, request: InFlight) -> list[Span]:
        """Register a read, and return the spans that hold its bytes. Raises StoreError if some bytes were never written
        or are being written."""
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
        """Register a write. Return the write's spans (bytes that are contiguous in the store) and the write's pieces.
        Each piece gets one checksum. Raises StoreError if a request for these bytes is in flight, or if the record is
        frozen."""
        start, end = request.start, request.end
        with self._lock:
            state = self._admit(record, request)
            self._refuse_while_frozen(record)
            state.in_flight.append(request)
            runs = join(other_slots(state.durable.overlapping(start, end) if state.durable else (), start, end))
            return locate(state.record, runs, start, end), [piece for run in runs for piece in cut(run)]

    def end(self, record: Record, request: InFlight, written: Sequence[Range] = ()) -> None:
        """Remove a request that has ended or could not start. `written`: the ranges that this request has written."""
        with self._lock:
            state = self._states.get(record.name)
            if state is None or request not in state.in_flight:
                return
            if written:
                state.written.replace(request.start, request.end, written)
            state.in_flight.remove(request)

    def end_all(self) -> None:
        """Remove all requests from the table. Call this only after waiting for them."""
        with self._lock:
            for state in self._states.values():
                state.in_flight = []

    def freeze(self, step: int) -> list[Written]:
        """Refuse writes to all records that take part in commits, until `thaw`. Return these records, each with its
        written ranges. Raises StoreError if one of them is being written, or if they are frozen already."""
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
        """Return the ranges in the durable manifest that share bytes with `[start, end)`. They are not cut at `start`
        and `end`."""
        with self._lock:
            durable = self._find(record).durable
            return [] if durable is None else durable.overlapping(start, end)

    def set_written(self, record: Record, ranges: Sequence[Range]) -> None:
        """Replace a record's written ranges by the same ranges with checksums. Called between `freeze` and `thaw`."""
        with self._lock:
            self._find(record).written = RangeMap(ranges)

    def thaw(self, durable: Mapping[str, Sequence[Range]] | None) -> None:
        """Allow writes again. `durable`: each record's ranges in the new durable manifest; None if there is no new
        manifest."""
        with self._lock:
            self._frozen = None
            if durable is None:
                return
            for name, ranges in durable.items():
                self._states[name].durable = RangeMap(ranges)

    def revert(self) -> None:
        """Revert all records that take part in commits to the last commit. A record that is not in the last commit
        becomes empty. Raises StoreError if one of the records is in use or frozen."""
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
            raise StoreError(f"Record {record.name!r} is frozen: step {self._frozen} is prepared; confirm it first.")
