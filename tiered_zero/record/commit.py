"""Commit a swap store in two phases, and keep the right state when one of them fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from tiered_zero.concurrency.transfer import FailureLatch, wait_all
from tiered_zero.errors import CorruptionError, StoreError, TransferError
from tiered_zero.io.engine import IOTransfer
from tiered_zero.record import manifest
from tiered_zero.record.directory import SwapDir
from tiered_zero.record.manifest import Manifest, Range, Record
from tiered_zero.record.reader import hashed, locate, mismatches
from tiered_zero.record.stripes import StripedFiles
from tiered_zero.record.table import RecordTable
from tiered_zero.system.resources import map_memory

_TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errors in writing a manifest after which the same commit may be tried again."""


@final
class TwoPhaseCommit:
    """The durable states of one store: the committed one and, possibly, a prepared one. The store's thread drives it.

    Data is durable before the manifest, and the manifest before its final name. `RecordTable` keeps writes away from
    extents that the durable manifest names. A transient failure changes nothing; any other latches the store.
    """

    def __init__(
        self,
        directory: SwapDir,
        files: StripedFiles,
        table: RecordTable,
        latch: FailureLatch,
        state: Manifest | None,
        is_hashed: bool,
    ) -> None:
        """`state`: the committed state; its records enter the table. `is_hashed`: every committed range needs a
        checksum; a range that a partial rewrite left without one is read to compute it. Raises StoreError."""
        self._directory = directory
        self._first = directory.paths[0]
        self._files = files
        self._table = table
        self._latch = latch
        self._is_hashed = is_hashed
        self._prepared: Manifest | None = None
        self.step: int | None = None
        self.metadata: dict[str, Any] = {}
        if state is not None:
            table.adopt((record, state.ranges[record.name]) for record in state.records)
            self.step, self.metadata = state.step, state.metadata

    def commit(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Make `step` the committed state. Raises what `prepare` and `confirm` raise."""
        try:
            self.prepare(step, metadata)
            self.confirm()
        except BaseException:
            if self.is_undecided:  # interrupted between the two
                self.cancel()
            raise

    def prepare(self, step: int, metadata: Mapping[str, Any]) -> None:
        """Make `step` durable next to the last state: the data, then the manifest. Raises StoreError, TransferError."""
        written = self._table.freeze(step)
        try:
            if self._is_hashed:
                written = [(record, self._hashed(record, ranges)) for record, ranges in written]
            state = Manifest(
                run_id=self._directory.run_id,
                step=step,
                capacity_nbytes=self._table.capacity_nbytes,
                weights=self._files.stripes.weights,
                metadata=dict(metadata),
                records=tuple(record for record, _ in written),
                ranges={record.name: list(ranges) for record, ranges in written},
            )
            data = state.encode()
            with self._latching():  # a sync is never tried again: the kernel may have dropped the pages
                wait_all(self._files.sync())
            self._directory.keep()
            manifest.prepare(self._first, data)
        except (StoreError, ValueError):  # ValueError: the manifest would not be valid
            self._table.thaw(None)
            raise
        except OSError as error:
            if isinstance(error, TransferError):
                raise
            raise self._not_prepared(step, error) from error
        self._prepared = state

    def confirm(self) -> None:
        """Make the prepared state the committed one; the extents of the last one become reusable. Raises StoreError."""
        state = self._prepared
        if state is None:
            raise StoreError("Nothing is prepared; call prepare first.")
        try:
            manifest.confirm(self._first)
            self._prepared = None
            self._table.thaw(state.ranges)
            self.step, self.metadata = state.step, state.metadata
        except OSError as error:
            self._latch.set(error)
            raise StoreError(f"The commit of step {state.step} failed: {error}. Resume from what is there.") from error
        except BaseException as error:  # such as a second Ctrl-C: it may be durable or not
            self._latch.set(error)
            raise

    @property
    def is_undecided(self) -> bool:
        """Whether a state is prepared and its `confirm` has not begun."""
        return self._prepared is not None and self._latch.error is None

    def cancel(self) -> None:
        """Drop the prepared state, if any, durably. Raises StoreError."""
        if self._prepared is None:
            return
        try:
            manifest.discard(self._first)
        except OSError as error:
            self._latch.set(error)
            step = self._prepared.step
            raise StoreError(f"Step {step} cannot be dropped: {error}. Resume from what is there.") from error
        self._restore()
        self._prepared = None

    def resume_text(self) -> str:
        """Name the state from which a run can resume, for messages."""
        return "the last checkpoint" if self.step is None else f"step {self.step}, committed in {self._first}"

    def _restore(self) -> None:
        """Allow writes again, on top of the last state, after the next manifest was removed."""
        self._directory.keep(self.step is not None)
        self._table.thaw(None)

    def _hashed(self, record: Record, ranges: Sequence[Range]) -> Sequence[Range]:
        """Read the ranges without a checksum and compute it. Raises TransferError, CorruptionError."""
        if all(item.digest is not None for item in ranges):
            return ranges
        with self._latching():
            found = [item if item.digest is not None else self._with_digest(record, item) for item in ranges]
        self._table.set_written(record, found)
        return found

    def _with_digest(self, record: Record, item: Range) -> Range:
        """Return `item` with its digest. If a range of the last commit contains it, verify that range first."""
        durable = self._table.durable(record, item.start, item.end)
        whole = next((one for one in durable if one.slot == item.slot and one.digest is not None), item)
        (span,) = locate(record, [whole], whole.start, whole.end)
        memory, parts = memoryview(map_memory(whole.end - whole.start)), list[IOTransfer]()
        self._files.submit(self._files.engine.read, span.address, memory, parts)
        wait_all(parts)
        if whole.digest is not None and any(mismatches([whole], memory, whole.start)):
            raise CorruptionError(
                f"Record {record.name!r}: bytes {whole.start} to {whole.end} are not those written. Check the disk and "
                f"resume from {self.resume_text()}."
            )
        return hashed([item], memory, whole.start)[0]

    @contextmanager
    def _latching(self) -> Iterator[None]:
        """Latch the store if the disk fails inside the block."""
        try:
            yield
        except Exception as error:
            self._latch.set(error)
            raise

    def _not_prepared(self, step: int, error: OSError) -> StoreError:
        """Return the error of a manifest that could not be written; latch the store unless the failure is transient."""
        text = (
            f"The manifest of step {step} cannot be written to {self._first}: {error}. "
            "What was committed before is untouched"
        )
        try:
            if error.errno not in _TRANSIENT:
                raise error
            manifest.discard(self._first)  # durably, because its extents will be written again
        except OSError as failure:
            self._latch.set(failure)
            return StoreError(f"{text}; resume from {self.resume_text()}.")
        self._restore()
        return StoreError(f"{text}; free some space (or file descriptors) and commit again.")
