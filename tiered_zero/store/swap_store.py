"""The swap store: records in preallocated files, checked reads and writes, all-or-nothing commits."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

from tiered_zero.errors import CorruptionError, LatchedError, StoreError
from tiered_zero.io.engine import IOEngine, Request, Ticket
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.store import manifest
from tiered_zero.store.extents import ExtentMap, pack
from tiered_zero.store.manifest import Manifest, Record
from tiered_zero.store.ranges import Range, RangeMap, cut, first_gap, join, other_slots
from tiered_zero.store.stripes import StripedFiles, Stripes
from tiered_zero.store.swap_dir import SwapDir
from tiered_zero.store.tickets import Once, StoreTicket, Worker, digest
from tiered_zero.store.verify import Broken, find_broken

CHUNK_NBYTES = MIB
"""A write is checksummed in pieces that end at multiples of this, counted from the record's start."""

_SAMPLE = 16
"""With checksums "sample" one chunk of so many has one."""

Checksums = Literal["all", "sample", "off"]


@final
@dataclass
class _State:
    """What the store knows of one record. `durable`: as the durable manifest names it, None where it does not."""

    record: Record
    written: RangeMap = field(default_factory=RangeMap)
    durable: RangeMap | None = None
    in_flight: list[tuple[str, int, int]] = field(default_factory=list)


@final
class SwapStore:
    """Named records on NVMe. Driven by one thread; its tickets may be waited on by any.

    A request that overlaps another of the same record that is still in flight is refused unless both are reads: order
    is the caller's, who waits on tickets. A failed write or sync latches the store: it only raises from then on.
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
    ) -> None:
        """Create and preallocate the data files, `capacity_nbytes` (in whole pages) together.

        `weights`: the speed of each of the directory's paths, in any unit; equal by default. `state`: open the files
        as this manifest describes them instead (use `recover`). Raises StoreError when the disk is too small; the
        directory is removed then.
        """
        if checksums not in ("all", "sample", "off"):
            raise StoreError(f"checksums must be all, sample or off; found {checksums!r}.")
        stripes = Stripes(weights or [1.0] * len(directory.paths))
        if len(stripes.weights) != len(directory.paths):
            raise StoreError(f"{len(directory.paths)} swap paths need as many weights; found {list(weights)}.")
        self.capacity_nbytes = align_up(capacity_nbytes, PAGE_NBYTES)
        self.step: int | None = None
        self.metadata: dict[str, Any] = {}
        self._directory = directory
        self._checksums = checksums
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._extents = ExtentMap(self.capacity_nbytes)
        self._retired: list[Record] = []
        self._prepared: Manifest | None = None
        self._failure: Exception | None = None
        self._num_chunks = 0
        self._nbytes: dict[str, Counter[str]] = {"read": Counter(), "write": Counter(), "unverified": Counter()}
        if state is None:
            try:
                self._files = StripedFiles.create(engine, directory.paths, stripes, self.capacity_nbytes)
                for path in directory.paths:
                    manifest.sync_directory(path)
            except Exception:
                directory.remove()
                raise
        else:
            self._files = StripedFiles.open(engine, directory.paths, stripes, self.capacity_nbytes)
            self._adopt(state)
        self._hashing = Worker("tiered_zero-hash")
        self._settling = Worker("tiered_zero-settle")

    @classmethod
    def recover(
        cls, directory: SwapDir, engine: IOEngine, *, step: int | None = None, checksums: Checksums = "all"
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
        )
        if chosen is committed:
            manifest.discard(first)
        else:
            manifest.confirm(first)
        return store

    @staticmethod
    def available_steps(directory: SwapDir) -> list[int]:
        """The steps that `recover` can open: the committed one, and one that was prepared but not confirmed."""
        return sorted({state.step for state in manifest.load(directory.paths[0]) if state is not None})

    # ------------------------------------------------------------------------------------------------ records

    def reserve(
        self, name: str, nbytes: int, *, dtype: str = "uint8", shape: tuple[int, ...] = (), committed: bool = False
    ) -> Record:
        """A home for `nbytes`, page-aligned; a committed one takes two slots. Its bytes cannot be read before written.

        Raises StoreError: the name is taken, or the capacity is used up.
        """
        if nbytes <= 0:
            raise StoreError(f"Record {name!r} must have at least one byte; found {nbytes}.")
        with self._lock:
            if name in self._states:
                raise StoreError(f"The store has a record {name!r} already; release it first, or choose another name.")
            offsets = [self._extents.allocate(nbytes)]
            if committed:
                try:
                    offsets.append(self._extents.allocate(nbytes))
                except StoreError:
                    self._extents.free(offsets[0], nbytes)
                    raise
            record = Record(name, nbytes, dtype, shape, committed, tuple(offsets))
            self._states[name] = _State(record)
        return record

    def reserve_packed(self, name: str, sizes: Mapping[str, int], **options: Any) -> tuple[Record, dict[str, int]]:
        """One record for many small items that move together, and each item's offset in it, a multiple of 64."""
        offsets, nbytes = pack(sizes)
        return self.reserve(name, nbytes, **options), offsets

    def release(self, record: Record) -> None:
        """Give the record's extents back; those that the durable manifest names after the next commit."""
        with self._lock:
            state = self._state(record)
            if state.in_flight:
                raise StoreError(f"Record {record.name!r} is still in use by {state.in_flight}; wait for its tickets.")
            self._refuse_while_prepared(record)
            del self._states[record.name]
            if state.durable is None:
                self._free(record)
            else:
                self._retired.append(record)

    def records(self) -> dict[str, Record]:
        """All records by name; after `recover` this is how to find them."""
        with self._lock:
            return {name: state.record for name, state in self._states.items()}

    @property
    def free_nbytes(self) -> int:
        return self._extents.free_nbytes

    @property
    def nbytes_written(self) -> dict[str, int]:
        """Bytes whose write has completed, by category: the record's name up to its first '/'."""
        return self._count("write")

    @property
    def nbytes_read(self) -> dict[str, int]:
        """Bytes whose read has completed, by category."""
        return self._count("read")

    @property
    def nbytes_unverified(self) -> dict[str, int]:
        """Bytes read without a checksum over them, by category; see the package's text for when that is."""
        return self._count("unverified")

    # ------------------------------------------------------------------------------------------------ transfers

    def read(self, record: Record, into: memoryview, offset: int = 0) -> Ticket:
        """Fill `into` from the record's byte `offset`; both in whole pages, the memory page-aligned.

        `wait()` raises TransferError, or CorruptionError when the bytes are not those written. Raises StoreError here
        for bytes that were never written.
        """
        into = memoryview(into).cast("B")
        end = offset + len(into)
        with self._lock:
            state = self._admit("read", record, offset, end)
            ranges = state.written.overlapping(offset, end)
            missing = first_gap(ranges, offset, end)
            if missing is not None:
                raise StoreError(
                    f"Record {record.name!r}: the bytes from {missing} on were never written; write them first."
                )
            state.in_flight.append(("read", offset, end))
        runs = join(Range(max(r.start, offset), min(r.end, end), r.slot, None) for r in ranges)
        whole = [r for r in ranges if r.digest is not None and offset <= r.start and r.end <= end]
        checks = whole if self._checksums != "off" else []
        return self._start("read", state, into, offset, runs, partial(self._settle_read, state, into, offset, checks))

    def write(self, record: Record, data: memoryview, offset: int = 0) -> Ticket:
        """Write `data` at the record's byte `offset`; both in whole pages, the memory page-aligned.

        The caller leaves `data` alone until the ticket is done. `wait()` raises TransferError.
        """
        data = memoryview(data).cast("B")
        end = offset + len(data)
        with self._lock:
            state = self._admit("write", record, offset, end)
            self._refuse_while_prepared(record)
            state.in_flight.append(("write", offset, end))
            runs = join(other_slots(state.durable, offset, end))
            pieces = [piece for run in runs for piece in cut(run, CHUNK_NBYTES)]
            hashed = [self._is_hashed() for _ in pieces]
        ranges: list[Range] = []

        def compute() -> None:
            for piece, wanted in zip(pieces, hashed, strict=True):
                view = data[piece.start - offset : piece.end - offset]
                ranges.append(piece._replace(digest=digest(view)) if wanted else piece)

        hashing = Once(compute)
        if any(hashed):
            self._hashing.submit(hashing.run)
        settle = partial(self._settle_write, state, offset, end, hashing, ranges)
        return self._start("write", state, data, offset, runs, settle)

    # ------------------------------------------------------------------------------------------------ commit

    def commit(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Make all committed records, as written so far, the durable state `step`. `metadata`: JSON only.

        Returns when it survives power loss. Until then the last committed state does.
        """
        self.prepare(step, metadata)
        self.confirm()

    def prepare(self, step: int, metadata: Mapping[str, Any]) -> None:
        """First half of `commit`: the new state is durable beside the last one; `recover` can open either.

        Processes that must commit together prepare, meet, and confirm. Committed records rest until `confirm`.
        Raises StoreError while one of them is being written.
        """
        with self._lock:
            self._check()
            if self._prepared is not None:
                raise StoreError(f"Step {self._prepared.step} is prepared; confirm it before the next one.")
            states = [state for state in self._states.values() if state.record.committed]
            busy = [state.record.name for state in states if any(kind == "write" for kind, _, _ in state.in_flight)]
            if busy:
                raise StoreError(f"Cannot commit while records are being written ({busy[:5]}); wait for their tickets.")
            state = Manifest(
                run_id=self._directory.run_id,
                step=step,
                capacity_nbytes=self.capacity_nbytes,
                weights=self._files.stripes.weights,
                metadata=dict(metadata),
                records=tuple(state.record for state in states),
                ranges={state.record.name: list(state.written) for state in states},
            )
            data = state.encode()
            self._prepared = state
        self._directory.keep()
        first = self._directory.paths[0]
        try:
            for ticket in self._files.sync():
                ticket.wait()
        except Exception as error:
            self._latch(error)
            raise
        try:
            manifest.prepare(first, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._latch(error)
                raise
            self._prepared = None
            manifest.discard(first)
            raise StoreError(
                f"The manifest of step {step} does not fit on the disk of {first} ({error}). What was committed before "
                "is untouched; free some space and commit again."
            ) from error

    def confirm(self) -> None:
        """Second half of `commit`: the prepared state is the committed one; its predecessor's extents are reusable."""
        state = self._prepared
        if state is None:
            raise StoreError("Nothing is prepared; call prepare first.")
        try:
            with self._lock:
                self._check()
            manifest.confirm(self._directory.paths[0])
        except Exception as error:
            self._latch(error)
            raise
        with self._lock:
            for name, ranges in state.ranges.items():
                self._states[name].durable = RangeMap(ranges)
            for record in self._retired:
                self._free(record)
            self._retired.clear()
            self._prepared = None
            self.step, self.metadata = state.step, state.metadata

    def verify(self) -> list[Broken]:
        """Read everything that was written, past this store's engine, and name what is not as written."""
        with self._lock:
            busy = [name for name, state in self._states.items() if state.in_flight]
            if busy:
                raise StoreError(f"Cannot verify while records are in use ({busy[:5]}); wait for their tickets.")
            records = [(state.record, list(state.written)) for state in self._states.values()]
        return find_broken(self._directory.paths, self._files.stripes, records)

    def close(self, remove: bool = True) -> None:
        """Let requests finish, close the files, end the directory's ownership. Idempotent.

        `remove=False` leaves a directory with a committed state on disk for `recover`; one without is removed anyway.
        """
        self._settling.close()
        self._hashing.close()
        self._files.close()
        if remove:
            self._directory.remove()
        else:
            self._directory.release()

    # ------------------------------------------------------------------------------------------------ inside

    def _adopt(self, state: Manifest) -> None:
        for record in state.records:
            for offset in record.offsets:
                self._extents.claim(offset, record.nbytes)
            ranges = state.ranges[record.name]
            self._states[record.name] = _State(record, RangeMap(ranges), RangeMap(ranges))
        self.step, self.metadata = state.step, state.metadata

    def _start(
        self,
        kind: str,
        state: _State,
        memory: memoryview,
        offset: int,
        runs: list[Range],
        settle: Callable[[Exception | None], None],
    ) -> Ticket:
        """Submit the runs of one request and have the ticket settled even if nobody waits for it."""
        submit = self._files.read if kind == "read" else self._files.write
        addresses = [state.record.offsets[run.slot] + run.start for run in runs]
        request = Request(kind, *self._files.locate(addresses[0]), len(memory))
        parts: list[Ticket] = []
        try:
            for address, run in zip(addresses, runs, strict=True):
                parts += submit(address, memory[run.start - offset : run.end - offset])
        except Exception as error:
            refused = error
            StoreTicket(request, parts, lambda _: settle(refused)).settle()  # waits for the parts under way
            raise
        ticket = StoreTicket(request, parts, settle)
        self._settling.submit(ticket.settle)
        return ticket

    def _settle_read(
        self, state: _State, into: memoryview, offset: int, checks: list[Range], error: Exception | None
    ) -> None:
        end = offset + len(into)
        if error is None:
            error = self._find_corruption(state.record, into, offset, checks)
        with self._lock:
            state.in_flight.remove(("read", offset, end))
            if error is None:
                category = _category(state.record)
                self._nbytes["read"][category] += end - offset
                self._nbytes["unverified"][category] += end - offset - sum(r.end - r.start for r in checks)
        if error is not None:
            raise error

    def _settle_write(
        self, state: _State, offset: int, end: int, hashing: Once, ranges: list[Range], error: Exception | None
    ) -> None:
        if error is None:
            hashing.wait()
        else:
            hashing.run()  # it reads the caller's memory
            self._latch(error)
        with self._lock:
            state.in_flight.remove(("write", offset, end))
            if error is None:
                state.written.replace(offset, end, ranges)
                self._nbytes["write"][_category(state.record)] += end - offset
        if error is not None:
            raise error

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

    def _admit(self, kind: str, record: Record, start: int, end: int) -> _State:
        """Under the lock: the record's state, if this request is one that may be made now."""
        self._check()
        state = self._state(record)
        if start % PAGE_NBYTES or end % PAGE_NBYTES or not 0 <= start < end <= record.extent_nbytes:
            raise StoreError(
                f"Record {record.name!r} holds {record.extent_nbytes} bytes in whole pages of {PAGE_NBYTES}; "
                f"a {kind} of bytes {start} to {end} is not inside of it or not in whole pages."
            )
        for other, low, high in state.in_flight:
            if low < end and start < high and "write" in (kind, other):
                raise StoreError(
                    f"Record {record.name!r}: a {kind} of bytes {start} to {end} overlaps a {other} of bytes {low} to "
                    f"{high} that is still in flight; wait for its ticket first."
                )
        return state

    def _state(self, record: Record) -> _State:
        state = self._states.get(record.name)
        if state is None or (state.record is not record and state.record != record):
            raise StoreError(
                f"The store has no record {record.name!r} like this one; it was released, or is another's."
            )
        return state

    def _refuse_while_prepared(self, record: Record) -> None:
        if self._prepared is not None and record.committed:
            raise StoreError(
                f"Record {record.name!r} must rest: step {self._prepared.step} is prepared; confirm it first."
            )

    def _is_hashed(self) -> bool:
        self._num_chunks += 1
        return self._checksums == "all" or (self._checksums == "sample" and self._num_chunks % _SAMPLE == 1)

    def _free(self, record: Record) -> None:
        for offset in record.offsets:
            self._extents.free(offset, record.nbytes)

    def _count(self, kind: str) -> dict[str, int]:
        with self._lock:
            return dict(self._nbytes[kind])

    def _latch(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise LatchedError(
                f"The swap store failed earlier and cannot be trusted any more: {self._failure} "
                f"Resume from {self._resume_text()}."
            ) from self._failure

    def _resume_text(self) -> str:
        return (
            "the last checkpoint" if self.step is None else f"step {self.step}, committed in {self._directory.paths[0]}"
        )


def _category(record: Record) -> str:
    return record.name.partition("/")[0]
