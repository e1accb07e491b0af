"""The swap store: records in preallocated files, checked reads and writes, all-or-nothing commits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, final

from tiered_zero.concurrency.failure_latch import FailureLatch
from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.errors import CorruptionError, StoreError, TransferError
from tiered_zero.io.engine import IOEngine, IOTransfer
from tiered_zero.store import manifest
from tiered_zero.store.checksums import CHUNK_NBYTES, first_mismatch, hashed, is_same
from tiered_zero.store.directory import SwapDir
from tiered_zero.store.manifest import Manifest, Record
from tiered_zero.store.ranges import Range, cut, join
from tiered_zero.store.records import InFlight, RecordTable
from tiered_zero.store.stripes import PieceRequest, StripedFiles, Stripes
from tiered_zero.store.transfers import Once, StoreTransfer, Worker
from tiered_zero.store.two_phase_commit import TwoPhaseCommit
from tiered_zero.system.process import OwnProcess
from tiered_zero.telemetry.spans import Recorder

_STUCK_S = 5.0
"""How long `close` waits for requests after a failure; they may be stuck for ever."""


@final
class SwapStore:
    """Named records on NVMe. Driven by one thread; its transfers may be waited on by any.

    A request that overlaps another of the same record that is still in flight is refused unless both are reads: the
    caller orders them, by waiting. A failed transfer or sync latches the store: it only raises from then on.
    """

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
        """Create and preallocate the data files, `capacity_nbytes` (in whole pages) together.

        `weights`: the speed of each of the directory's paths, in any unit; equal by default. `state`: open the files
        as this manifest describes them instead (use `recover`). `recorder`: gets a span for each request. Raises
        StoreError when the disk is too small; the directory is removed then.
        """
        self._is_hashed = checksums == "all"
        stripes = Stripes(weights or (state.weights if state is not None else [1.0] * len(directory.paths)))
        if len(stripes.weights) != len(directory.paths):
            raise StoreError(f"{len(directory.paths)} swap paths need as many weights; found {list(weights)}.")
        self._process = OwnProcess("swap store", StoreError)
        self._directory = directory
        self._table = RecordTable(capacity_nbytes)
        self._latch = FailureLatch()
        self._recorder = recorder
        self._count_lock = threading.Lock()
        self._nbytes: dict[str, Counter[str]] = {"read": Counter(), "write": Counter(), "unverified": Counter()}
        with ExitStack() as unfinished:
            if state is None:
                unfinished.callback(directory.remove)
            open_files = StripedFiles.create if state is None else StripedFiles.open
            self._files = open_files(engine, directory.paths, stripes, self.capacity_nbytes)
            unfinished.callback(self._files.close)
            self._commits = TwoPhaseCommit(directory, self._files, self._table, self._latch, state, self._is_hashed)
            self._hashing = Worker("tiered_zero-hash")
            unfinished.callback(self._hashing.close)
            self._finalizing = Worker("tiered_zero-finalize")
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
        """Open the last committed state of a run that ended (`SwapDir.open`).

        `step`: the state of this step instead, which may be one that was prepared and never confirmed; `metadata`:
        items that it must have.
        Raises StoreError: nothing committed, a damaged manifest, a missing or truncated file.
        """
        first = directory.paths[0]
        chosen, is_committed = manifest.choose(first, step, metadata)
        nbytes = chosen.capacity_nbytes
        store = cls(directory, engine, capacity_nbytes=nbytes, checksums=checksums, state=chosen, recorder=recorder)
        try:
            if is_committed:
                manifest.discard(first)
            else:
                manifest.confirm(first)
        except Exception:
            store.close(remove=False)
            raise
        return store

    @property
    def capacity_nbytes(self) -> int:
        """Bytes of the data files together, by now."""
        return self._table.capacity_nbytes

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories of the run."""
        return tuple(map(str, self._directory.paths))

    @property
    def step(self) -> int | None:
        """The step of the last commit."""
        return self._commits.step

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the last commit."""
        return self._commits.metadata

    @property
    def engine(self) -> IOEngine:
        """The engine that moves the bytes."""
        return self._files.engine

    @property
    def run_id(self) -> str:
        """The id of the run that owns the directories."""
        return self._directory.run_id

    def reserve(self, name: str, nbytes: int, *, committed: bool = False, write_once: bool = False) -> Record:
        """Reserve `nbytes`, page-aligned; a committed record takes two slots. Its bytes cannot be read before written.

        `write_once`: a committed one takes one slot, and the second once bytes of a commit are changed, for which the
        files may grow. Raises StoreError: the name is taken, or the capacity is used up.
        """
        num_slots = 2 if committed and not write_once else 1
        return self._table.reserve(name, nbytes, committed=committed, num_slots=num_slots)

    def release(self, record: Record) -> None:
        """Free the record's extents; those that the durable manifest names after the next commit."""
        self._table.release(record)

    def num_slots(self, record: Record) -> int:
        """Places that the record has on the disk by now."""
        return len(self._table.current(record).offsets)

    def records(self) -> dict[str, Record]:
        """All records by name; after `recover` this is how to find them."""
        return self._table.records()

    def nbytes(self, kind: Literal["read", "write", "unverified"]) -> dict[str, int]:
        """Bytes whose read or write has completed, or that were read without a checksum over them (see the package's
        text for when that is), by category: the record's name up to its first '/'."""
        with self._count_lock:
            return dict(self._nbytes[kind])

    def read(self, record: Record, into: memoryview, offset: int = 0, *, urgent: bool = False) -> Transfer:
        """Fill `into` from the record's byte `offset`; both in whole pages, the memory page-aligned.

        `urgent`: see IOEngine.read. `wait()` raises TransferError, or CorruptionError when the bytes are not those
        written. Raises StoreError here for bytes that were never written.
        """
        self._check()
        into = memoryview(into).cast("B")
        record, end = self._table.current(record), offset + len(into)
        request = InFlight(kind="read", start=offset, end=end)
        with self._ended_on_error(record, request):
            ranges = self._table.begin_read(record, request)
            whole = (r for r in ranges if r.digest is not None and offset <= r.start and r.end <= end)
            checks = list(whole) if self._is_hashed else []
            runs = join(Range(max(r.start, offset), min(r.end, end), r.slot, None) for r in ranges)
            read = partial(self._files.engine.read, urgent=urgent)
            finalize = partial(self._end_read, record, request, into, checks)
            return self._start(request, read, record, into, runs, finalize)

    def write(self, record: Record, data: memoryview, offset: int = 0) -> Transfer:
        """Write `data` at the record's byte `offset`; both in whole pages, the memory page-aligned.

        The caller leaves `data` alone until the transfer is done. `wait()` raises TransferError. Raises StoreError here
        where a record that is written once needs more space than there is.
        """
        self._check()
        data = memoryview(data).cast("B")
        if kept := self._table.kept(record, offset, offset + len(data)):
            if is_same(kept, data, offset):
                return COMPLETED
            self._add_slot(record)
        record = self._table.current(record)
        request = InFlight(kind="write", start=offset, end=offset + len(data))
        with self._ended_on_error(record, request):
            runs = self._table.begin_write(record, request)
            written = [piece for run in runs for piece in cut(run, CHUNK_NBYTES)]

            def compute() -> None:
                written[:] = hashed(written, data, offset)

            hashing = Once(compute) if self._is_hashed else COMPLETED
            finalize = partial(self._end_write, record, request, hashing, written)
            if isinstance(hashing, Once):
                self._hashing.submit(hashing.run)
            return self._start(request, self._files.engine.write, record, data, runs, finalize)

    def commit(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Make all committed records, as written so far, the durable state `step`. `metadata`: JSON only.

        Returns when it survives power loss. Until then the last committed state does.
        """
        self._check()
        self._commits.commit(step, metadata)

    def prepare(self, step: int, metadata: Mapping[str, Any]) -> None:
        """First half of `commit`: the new state is durable next to the last one; `recover` can open either.

        Processes that must commit together prepare, meet, and confirm. Committed records rest until `confirm`.
        Raises StoreError while one of them is being written, and, with nothing changed, if the manifest does not fit.
        """
        self._check()
        self._commits.prepare(step, metadata, is_alone=False)

    def confirm(self) -> None:
        """Second half of `commit`: the prepared state is the committed one; its predecessor's extents are reusable."""
        self._check()
        self._commits.confirm()

    @property
    def is_undecided(self) -> bool:
        """Whether a state is prepared, and its `confirm` has not begun."""
        return self._commits.is_undecided

    def cancel_prepared(self) -> None:
        """Drop the prepared state, if there is one, durably: another store of the same commit could not prepare."""
        self._commits.cancel()

    def revert(self) -> None:
        """Return the committed records to the last commit, as `recover` would find them. Driver thread."""
        self._check()
        self._table.revert()

    def drain_all(self) -> None:
        """Wait for every request, without its error. No other thread uses the store at this time."""
        self._files.engine.drain()
        finalized = threading.Event()
        self._finalizing.submit(finalized.set)
        finalized.wait(None if self._latch.error is None else _STUCK_S)
        self._table.end_all()

    def close(self, remove: bool = True) -> None:
        """Let requests finish, close the files, end the directory's ownership. Idempotent.

        `remove=False` leaves a directory with a committed state on disk for `recover`; one without is removed anyway.
        """
        if not self._process.is_current():
            return  # a forked child owns nothing
        for worker in (self._finalizing, self._hashing):
            worker.close(None if self._latch.error is None else _STUCK_S)
        self._files.close()
        if remove:
            self._directory.remove()
        else:
            self._directory.release()

    @contextmanager
    def _ended_on_error(self, record: Record, request: InFlight) -> Iterator[None]:
        """If the block raises, the request has ended when that is passed on: nothing of it moves bytes any more."""
        try:
            yield
        except Exception:
            if request.transfer is not None:
                request.transfer.run()
            self._table.end(record, request)
            raise

    def _start(
        self,
        request: InFlight,
        act: PieceRequest,
        record: Record,
        memory: memoryview,
        runs: list[Range],
        finalize: Callable[[Exception | None], None],
    ) -> Transfer:
        """Submit the runs of one request; the transfer is finalized even if the caller does not wait for it."""
        addresses = [record.offsets[run.slot] + run.start for run in runs]
        parts, begun_s = list[IOTransfer](), time.perf_counter()
        refused: list[Exception] = [StoreError(f"A {request.kind} of record {record.name!r} was interrupted.")]

        def end(error: Exception | None) -> None:
            finalize(refused[0] if refused else error)
            if self._recorder is not None:
                end_s = begun_s + max(part.seconds for part in parts)
                nbytes = request.end - request.start
                self._recorder.add(f"disk {request.kind}", request.kind, record.name, begun_s, end_s, nbytes)

        request.transfer = transfer = StoreTransfer(
            f"{request.kind} of {self._files.locate(addresses[0])[0]}", parts, end
        )
        try:
            for address, run in zip(addresses, runs, strict=True):
                self._files.submit(act, address, memory[run.start - request.start : run.end - request.start], parts)
        except Exception as error:
            refused[0] = error
            raise
        refused.clear()  # until then it is not known what of a write has been written
        self._finalizing.submit(transfer.run)
        return transfer

    def _add_slot(self, record: Record) -> None:
        """Give a record that is written once its second slot. Raises StoreError."""
        if not self._table.add_slot(record):
            capacity_nbytes = self.capacity_nbytes + record.extent_nbytes
            self._files.grow(capacity_nbytes)
            self._table.grow(capacity_nbytes)
            self._table.add_slot(record)

    def _end_read(
        self, record: Record, request: InFlight, into: memoryview, checks: list[Range], error: Exception | None
    ) -> None:
        if isinstance(error, TransferError):
            self._latch.set(error)
        if error is None and (mismatch := first_mismatch(checks, into, request.start)) is not None:
            error = self._corruption(record, *mismatch)
        self._table.end(record, request)
        if error is not None:
            raise error
        self._count(record, read=len(into), unverified=len(into) - sum(item.end - item.start for item in checks))

    def _end_write(
        self, record: Record, request: InFlight, hashing: Transfer, written: list[Range], error: Exception | None
    ) -> None:
        hashing.wait()  # on failure too: it reads the caller's memory
        if error is not None:
            self._latch.set(error)
            self._table.end(record, request)
            raise error
        self._table.end(record, request, written)
        self._count(record, write=request.end - request.start)

    def _corruption(self, record: Record, item: Range, found: int) -> CorruptionError:
        path, at = self._files.locate(record.offsets[item.slot] + item.start)
        return CorruptionError(
            f"Record {record.name!r}: bytes {item.start} to {item.end}, read from {path} at offset {at}, are not those "
            f"written (xxh3 {item.digest:016x} expected, {found:016x} found). Nothing was updated from them. Check the "
            f"disk and resume from {self._commits.resume_text()}."
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
                f"{error} Resume from {self._commits.resume_text()}."
            )
        )
