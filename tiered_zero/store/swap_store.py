"""The swap store: records in preallocated files, checked reads and writes, all-or-nothing commits."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from tiered_zero.errors import CorruptionError, StoreError, TransferError
from tiered_zero.failure_latch import FailureLatch
from tiered_zero.hardware.process import OwnProcess
from tiered_zero.io.engine import IOEngine, IOTransfer
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.store import manifest
from tiered_zero.store.manifest import Manifest, Record
from tiered_zero.store.ranges import Range, cut, join
from tiered_zero.store.records import InFlight, RecordTable
from tiered_zero.store.stripes import PieceRequest, StripedFiles, Stripes
from tiered_zero.store.swap_dir import SwapDir
from tiered_zero.store.transfers import Once, StoreTransfer, Worker, digest
from tiered_zero.store.verify import Broken, find_broken
from tiered_zero.telemetry.spans import Recorder
from tiered_zero.transfer import COMPLETED, Transfer, wait_all

CHUNK_NBYTES = MIB
"""A write is checksummed in pieces that end at multiples of this, counted from the record's start."""

_SAMPLE = 16
"""With checksums "sample" one chunk of so many has one."""

_STUCK_S = 5.0
"""How long `close` waits for requests after a failure; they may be stuck for ever."""

_TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Failures to write a manifest after which the same commit may be tried again."""

Checksums = Literal["all", "sample", "off"]


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
        checksums: Checksums = "all",
        weights: Sequence[float] = (),
        state: Manifest | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Create and preallocate the data files, `capacity_nbytes` (in whole pages) together.

        `weights`: the speed of each of the directory's paths, in any unit; equal by default. `state`: open the files
        as this manifest describes them instead (use `recover`). `recorder`: gets a span for each request. Raises
        StoreError when the disk is too small; the directory is removed then.
        """
        if checksums not in ("all", "sample", "off"):
            raise StoreError(f"checksums must be all, sample or off; found {checksums!r}.")
        stripes = Stripes(weights or [1.0] * len(directory.paths))
        if len(stripes.weights) != len(directory.paths):
            raise StoreError(f"{len(directory.paths)} swap paths need as many weights; found {list(weights)}.")
        self.capacity_nbytes = align_up(capacity_nbytes, PAGE_NBYTES)
        self.step: int | None = None
        self.metadata: dict[str, Any] = {}
        self._process = OwnProcess("swap store", StoreError)
        self._directory = directory
        self._checksums = checksums
        self._table = RecordTable(self.capacity_nbytes)
        self._prepared: Manifest | None = None
        self._latch = FailureLatch()
        self._recorder = recorder
        self._num_chunks = 0
        self._count_lock = threading.Lock()
        self._nbytes: dict[str, Counter[str]] = {"read": Counter(), "write": Counter(), "unverified": Counter()}
        with ExitStack() as unfinished:
            if state is None:
                unfinished.callback(directory.remove)
                self._files = StripedFiles.create(engine, directory.paths, stripes, self.capacity_nbytes)
                unfinished.callback(self._files.close)
            else:
                self._files = StripedFiles.open(engine, directory.paths, stripes, self.capacity_nbytes)
                unfinished.callback(self._files.close)
                self._table.adopt((record, state.ranges[record.name]) for record in state.records)
                self.step, self.metadata = state.step, state.metadata
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
        checksums: Checksums = "all",
        recorder: Recorder | None = None,
    ) -> SwapStore:
        """Open the last committed state of a run that ended (`SwapDir.open`).

        `step`: a state of `available_steps` instead, which may be one that was prepared and never confirmed.
        Raises StoreError: nothing committed, a damaged manifest, a missing or truncated file.
        """
        first = directory.paths[0]
        committed, prepared = manifest.load(first)
        chosen = committed
        if step is not None and (committed is None or committed.step != step):
            chosen = prepared if prepared is not None and prepared.step == step else None
        if chosen is None:
            wanted = "a committed state" if step is None else f"the state of step {step}"
            raise StoreError(f"{first} does not hold {wanted}; it has the steps {cls.available_steps(directory)}.")
        store = cls(
            directory,
            engine,
            capacity_nbytes=chosen.capacity_nbytes,
            checksums=checksums,
            weights=chosen.weights,
            state=chosen,
            recorder=recorder,
        )
        try:
            if chosen is committed:
                manifest.discard(first)
            else:
                manifest.confirm(first)
        except BaseException:
            store.close(remove=False)
            raise
        return store

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories of the run."""
        return tuple(map(str, self._directory.paths))

    @property
    def engine(self) -> IOEngine:
        """What moves the bytes."""
        return self._files.engine

    @property
    def run_id(self) -> str:
        """Of the directories' owner."""
        return self._directory.run_id

    @staticmethod
    def available_steps(directory: SwapDir) -> list[int]:
        """The steps that `recover` can open: the committed one, and one that was prepared but not confirmed."""
        return sorted({state.step for state in manifest.load(directory.paths[0]) if state is not None})

    def reserve(
        self,
        name: str,
        nbytes: int,
        *,
        dtype: str = "uint8",
        shape: tuple[int, ...] = (),
        committed: bool = False,
        write_once: bool = False,
    ) -> Record:
        """A record of `nbytes`, page-aligned; a committed one takes two slots. Its bytes cannot be read before written.

        `write_once`: of a committed one that will hardly change: it takes one slot, and the second when bytes of a
        commit are changed after all, for which the files may grow. Raises StoreError: the name is taken, or the
        capacity is used up.
        """
        num_slots = 2 if committed and not write_once else 1
        return self._table.reserve(name, nbytes, dtype, shape, committed=committed, num_slots=num_slots)

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
            checks = [] if self._checksums == "off" else [r for r in ranges if r.digest is not None]
            checks = [r for r in checks if offset <= r.start and r.end <= end]
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
            if _is_same(kept, data, offset):
                return COMPLETED
            self._add_slot(record)
        record = self._table.current(record)
        request = InFlight(kind="write", start=offset, end=offset + len(data))
        with self._ended_on_error(record, request):
            runs = self._table.begin_write(record, request)
            pieces = [(piece, self._is_hashed()) for run in runs for piece in cut(run, CHUNK_NBYTES)]
            written: list[Range] = []

            def compute() -> None:
                done: list[Range] = []  # whole or nothing: an interrupt has the work done again
                for piece, hashed in pieces:
                    view = data[piece.start - offset : piece.end - offset]
                    done.append(piece._replace(digest=digest(view)) if hashed else piece)
                written[:] = done

            hashing = Once(compute)
            finalize = partial(self._end_write, record, request, hashing, written)
            if self._checksums != "off":
                self._hashing.submit(hashing.run)
            return self._start(request, self._files.engine.write, record, data, runs, finalize)

    def drain(self, record: Record) -> None:
        """Return when no request of the record is in flight: an interrupt may have cost a caller its transfer."""
        for request in self._table.in_flight(record):
            if request.transfer is not None:
                request.transfer.run()

    def commit(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Make all committed records, as written so far, the durable state `step`. `metadata`: JSON only.

        Returns when it survives power loss. Until then the last committed state does.
        """
        self._prepare(step, metadata, is_alone=True)
        self.confirm()

    def prepare(self, step: int, metadata: Mapping[str, Any]) -> None:
        """First half of `commit`: the new state is durable next to the last one; `recover` can open either.

        Processes that must commit together prepare, meet, and confirm. Committed records rest until `confirm`.
        Raises StoreError while one of them is being written, and, with nothing changed, if the manifest does not fit.
        """
        self._prepare(step, metadata, is_alone=False)

    def _prepare(self, step: int, metadata: Mapping[str, Any], is_alone: bool) -> None:
        """`is_alone`: no other process or store needs to find what is prepared: the manifest may become durable before
        the data, and its name not at all, until it is confirmed."""
        self._check()
        first = self._directory.paths[0]
        written = self._table.freeze(step)
        try:
            state = Manifest(
                run_id=self._directory.run_id,
                step=step,
                capacity_nbytes=self.capacity_nbytes,
                weights=self._files.stripes.weights,
                metadata=dict(metadata),
                records=tuple(record for record, _ in written),
                ranges={record.name: list(ranges) for record, ranges in written},
            )
            data = state.encode()
            syncs = self._files.sync()
            if not is_alone:
                self._wait_synced(syncs)
            self._directory.keep()
            if is_alone:
                self._write_beside(first, data, syncs)
            else:
                manifest.prepare(first, data)
        except StoreError:
            self._table.thaw(None)
            raise
        except OSError as error:
            if isinstance(error, TransferError):
                raise
            raise self._not_prepared(step, error) from error
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: as if this had not begun
                self._drop_next(step)
            raise
        self._prepared = state

    def confirm(self) -> None:
        """Second half of `commit`: the prepared state is the committed one; its predecessor's extents are reusable."""
        self._check()
        state = self._prepared
        if state is None:
            raise StoreError("Nothing is prepared; call prepare first.")
        try:
            manifest.confirm(self._directory.paths[0])
        except OSError as error:
            self._latch.set(error)
            raise StoreError(f"The commit of step {state.step} failed: {error}. Resume from what is there.") from error
        except BaseException as error:  # an interrupt: whether it is durable is not known
            self._latch.set(error)
            raise
        self._prepared = None
        self._table.thaw(state.ranges)
        self.step, self.metadata = state.step, state.metadata

    def cancel_prepared(self) -> None:
        """Drop the prepared state, durably: another store of the same commit could not prepare. Nothing happens where
        none is prepared."""
        state = self._prepared
        if state is None:
            return
        self._drop_next(state.step)
        self._prepared = None

    def _drop_next(self, step: int) -> None:
        try:
            manifest.discard(self._directory.paths[0])
        except OSError as error:
            self._latch.set(error)
            raise StoreError(f"Step {step} cannot be dropped: {error}. Resume from what is there.") from error
        self._directory.keep(self.step is not None)
        self._table.thaw(None)

    def revert(self) -> None:
        """Return the committed records to the last commit, as `recover` would find them. Driver thread."""
        self._check()
        self._table.revert()

    def verify(self) -> list[Broken]:
        """Read everything that was written, past this store's engine, and name what is not as written."""
        return find_broken(self._directory.paths, self._files.stripes, self._table.at_rest())

    def drain_all(self) -> None:
        """Wait for every request, also for those whose transfer was lost because their caller was interrupted. No other
        thread uses the store at this time. Does not raise the error of a failed one."""
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
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt may have cost a part its transfer
                self._files.engine.drain()
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
        path, _ = self._files.locate(addresses[0])
        parts: list[IOTransfer] = []
        refused: list[Exception] = [StoreError(f"A {request.kind} of record {record.name!r} was interrupted.")]
        begun_s = time.perf_counter()

        def end(error: Exception | None) -> None:
            finalize(refused[0] if refused else error)
            if self._recorder is not None:
                end_s = begun_s + max(part.seconds for part in parts)
                nbytes = request.end - request.start
                self._recorder.add(f"disk {request.kind}", request.kind, record.name, begun_s, end_s, nbytes)

        request.transfer = transfer = StoreTransfer(f"{request.kind} of {path}", parts, end)
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
        """Give a record that is written once the slot for other values than those of the last commit. Raises
        StoreError."""
        if self._table.add_slot(record):
            return
        capacity_nbytes = self.capacity_nbytes + record.extent_nbytes
        self._files.grow(capacity_nbytes)
        self.capacity_nbytes = capacity_nbytes
        self._table.grow(capacity_nbytes)
        self._table.add_slot(record)

    def _end_read(
        self, record: Record, request: InFlight, into: memoryview, checks: list[Range], error: Exception | None
    ) -> None:
        if isinstance(error, TransferError):
            self._latch.set(error)
        if error is None:
            error = self._find_corruption(record, into, request.start, checks)
        self._table.end(record, request)
        if error is not None:
            raise error
        unverified_nbytes = len(into) - sum(item.end - item.start for item in checks)
        self._count(record, read=len(into), unverified=unverified_nbytes)

    def _end_write(
        self, record: Record, request: InFlight, hashing: Once, written: list[Range], error: Exception | None
    ) -> None:
        hashing.wait()  # on failure too: it reads the caller's memory
        if error is not None:
            self._latch.set(error)
            self._table.end(record, request)
            raise error
        self._table.end(record, request, written)
        self._count(record, write=request.end - request.start)

    def _find_corruption(
        self, record: Record, into: memoryview, offset: int, checks: list[Range]
    ) -> CorruptionError | None:
        for item in checks:
            found = digest(into[item.start - offset : item.end - offset])
            if found != item.digest:
                path, at = self._files.locate(record.offsets[item.slot] + item.start)
                return CorruptionError(
                    f"Record {record.name!r}: bytes {item.start} to {item.end}, read from {path} at offset {at}, are "
                    f"not those written (xxh3 {item.digest:016x} expected, {found:016x} found). Nothing was updated "
                    f"from them. Check the disk and resume from {self._resume_text()}."
                )
        return None

    def _is_hashed(self) -> bool:
        self._num_chunks += 1
        return self._checksums == "all" or (self._checksums == "sample" and self._num_chunks % _SAMPLE == 1)

    def _write_beside(self, first: Path, data: bytes, syncs: Sequence[Transfer]) -> None:
        """Write the next manifest while the data files are synced. Raises OSError, TransferError."""
        try:
            manifest.write_next(first, data)
        finally:
            self._wait_synced(syncs)

    def _wait_synced(self, syncs: Sequence[Transfer]) -> None:
        """Wait for the data files. A failure is never retried: the kernel may have dropped the pages."""
        try:
            wait_all(syncs)
        except Exception as error:
            self._latch.set(error)
            raise

    def _not_prepared(self, step: int, error: OSError) -> StoreError:
        """The manifest could not be written. Where that can pass, all is as before; else the store is latched."""
        first = self._directory.paths[0]
        text = (
            f"The manifest of step {step} cannot be written to {first}: {error}. What was committed before is untouched"
        )
        try:
            if error.errno not in _TRANSIENT:
                raise error
            manifest.discard(first)  # durably: its extents are written to again
        except OSError as failure:
            self._latch.set(failure)
            return StoreError(f"{text}; resume from {self._resume_text()}.")
        self._directory.keep(self.step is not None)
        self._table.thaw(None)
        return StoreError(f"{text}; free some space (or file descriptors) and commit again.")

    def _count(self, record: Record, **nbytes: int) -> None:
        category = record.name.partition("/")[0]
        with self._count_lock:
            for kind, more in nbytes.items():
                self._nbytes[kind][category] += more

    def _check(self) -> None:
        self._process.check()
        self._latch.check(self._refusal_text)

    def _refusal_text(self, error: BaseException) -> str:
        return (
            f"The swap store failed earlier and cannot be trusted any more: {error} Resume from {self._resume_text()}."
        )

    def _resume_text(self) -> str:
        if self.step is None:
            return "the last checkpoint"
        return f"step {self.step}, committed in {self._directory.paths[0]}"


def _is_same(kept: Sequence[Range], data: memoryview, offset: int) -> bool:
    """Whether `data`, to be written at `offset`, is what rests there, by the checksums of the same pieces."""
    pieces = list(cut(Range(offset, offset + len(data), 0, None), CHUNK_NBYTES))
    return [item[:2] for item in kept] == [piece[:2] for piece in pieces] and all(
        item.digest == digest(data[item.start - offset : item.end - offset]) for item in kept
    )
