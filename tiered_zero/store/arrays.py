"""Named arrays on disk for any program: no training engine, no torch.

    with open_store("/mnt/nvme/state", capacity_nbytes=8 << 30) as store:
        store.put("exp_avg", array)               # anything with the buffer protocol, C-contiguous
        store.commit(step=100)                    # all or nothing; what was put since the last one is durable now
        store.get("exp_avg", into=array)          # or: numpy.frombuffer(store.get("exp_avg"), "float32")

A CPU tensor is such an array through `tensor.view(torch.uint8).numpy()`, whatever its dtype.
Opened again, by the same or a later process, it holds the last commit.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from tiered_zero.errors import StoreError, TieredZeroError
from tiered_zero.io.engine import IOEngine
from tiered_zero.io.select import select_engine
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.store.manifest import Record
from tiered_zero.store.runs import RunInfo, list_runs
from tiered_zero.store.swap_dir import SwapDir
from tiered_zero.store.swap_store import SwapStore
from tiered_zero.transfer import Transfer, wait_all

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("tiered_zero")

_BOUNCE_NBYTES = 8 * MIB
"""A multiple of the checksum chunk, so that every read covers whole checksummed ranges."""


def open_store(path: str | Path, *, capacity_nbytes: int = 0, engine: IOEngine | None = None) -> ArrayStore:
    """Open the store that an earlier program committed under the directory `path`, or make a new one there.

    `capacity_nbytes`: only for a new one; each array takes its size in whole pages twice (the committed copy and the
    one being written), preallocated here. `engine`: by default the best that works in `path`, closed with the store.
    Raises StoreError: another live process has it open, the disk is too small, the state is damaged.
    """
    parent = Path(path)
    run = _find_store(parent)
    if run is None and capacity_nbytes <= 0:
        raise StoreError(f"{parent} holds no store; give capacity_nbytes to make one.")
    directory = SwapDir.open(run.path) if run else SwapDir.create([parent], owner_note="array store")
    with ExitStack() as unfinished:
        unfinished.callback(directory.release)
        if (used := engine) is None:
            used = select_engine(directory.paths[0]).engine
            unfinished.callback(used.close)
        store = (
            SwapStore.recover(directory, used) if run else SwapStore(directory, used, capacity_nbytes=capacity_nbytes)
        )
        unfinished.callback(store.close, remove=False)
        opened = ArrayStore(store, used, owns_engine=engine is None)
        unfinished.pop_all()
    return opened


def _find_store(parent: Path) -> RunInfo | None:
    """The run to be opened; None: there is none. One that cannot be read counts only where there is no other."""
    runs = [run for run in list_runs(parent) if run.resumable]
    found = [run for run in runs if run.pid and run.step is not None] or [run for run in runs if run.pid]
    if len(found) > 1:
        raise StoreError(
            f"{parent} holds {len(found)} committed states ({[run.run_id for run in found]}); keep one of them."
        )
    for run in runs:
        if run not in found:
            logger.warning("%s may hold a state, but cannot be opened (%s); it is left alone", run.path, run.reason)
    return found[0] if found else None


@final
class ArrayStore:
    """A store of named arrays. One thread; every call returns when its bytes have moved."""

    def __init__(self, store: SwapStore, engine: IOEngine, *, owns_engine: bool) -> None:
        self._store = store
        self._engine = engine
        self._owns_engine = owns_engine
        self._bounce = [mmap.mmap(-1, _BOUNCE_NBYTES) for _ in range(2)]

    def __enter__(self) -> ArrayStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """The arrays of the store."""
        return list(self._store.records())

    def describe(self, name: str) -> Record:
        """Size, dtype and shape of an array. Raises StoreError for an unknown name."""
        try:
            return self._store.records()[name]
        except KeyError:
            raise StoreError(f"The store has no array {name!r}; it has {self.names()[:20]}.") from None

    @property
    def step(self) -> int | None:
        """The step of the last commit; None before the first."""
        return self._store.step

    @property
    def metadata(self) -> dict[str, Any]:
        """What the last commit was given."""
        return self._store.metadata

    def put(self, name: str, array: Buffer, *, dtype: str = "", shape: tuple[int, ...] | None = None) -> None:
        """Write an array, new or in place of the one of that name. Durable with the next `commit`.

        `dtype`, `shape`: by default those of the buffer, kept for `describe`.
        """
        view = memoryview(array)
        dtype, shape = dtype or view.format, view.shape or () if shape is None else shape
        data = view.cast("B")
        record = self._store.records().get(name)
        if record is None or (record.nbytes, record.dtype, record.shape) != (len(data), dtype, shape):
            if record is not None:
                self._store.release(record)
            record = self._store.reserve(name, len(data), dtype=dtype, shape=shape, committed=True)
        transfers: list[Transfer | None] = [None, None]
        try:
            for turn, (start, memory) in enumerate(self._pieces(record)):
                if transfer := transfers[turn % 2]:
                    transfer.wait()
                part = data[start : start + len(memory)]
                memory[: len(part)] = part
                transfers[turn % 2] = self._store.write(record, memory, start)
        finally:
            wait_all(transfers)

    def get(self, name: str, into: Buffer | None = None) -> memoryview:
        """The array's bytes, in `into` (writable, of the array's size) or in new memory; checked before it returns."""
        record = self.describe(name)
        out = memoryview(bytearray(record.nbytes) if into is None else into).cast("B")
        if len(out) != record.nbytes:
            raise StoreError(f"Array {name!r} has {record.nbytes} bytes; the memory to read it into has {len(out)}.")
        ahead: list[tuple[int, memoryview, Transfer]] = []
        try:
            for start, memory in self._pieces(record):
                ahead.append((start, memory, self._store.read(record, memory, start)))
                if len(ahead) == 2:
                    _land(out, *ahead.pop(0))
            while ahead:
                _land(out, *ahead.pop(0))
        finally:
            with suppress(TieredZeroError):
                wait_all([transfer for _, _, transfer in ahead])
        return out

    def delete(self, name: str) -> None:
        """Drop an array; its space is free after the next `commit`."""
        self._store.release(self.describe(name))

    def commit(self, step: int = 0, metadata: Mapping[str, Any] | None = None) -> None:
        """Make everything that was put and deleted durable, all or nothing. `metadata`: JSON only."""
        self._store.commit(step, metadata or {})

    def close(self) -> None:
        """Close the store; what was not committed is lost, without any commit all of it. Idempotent."""
        self._store.close(remove=False)
        if self._owns_engine:
            self._engine.close()

    def _pieces(self, record: Record) -> Iterator[tuple[int, memoryview]]:
        """Where each piece of the record starts, and page-aligned memory of its size; the two buffers in turn."""
        for turn, start in enumerate(range(0, record.extent_nbytes, _BOUNCE_NBYTES)):
            nbytes = align_up(min(_BOUNCE_NBYTES, record.extent_nbytes - start), PAGE_NBYTES)
            yield start, memoryview(self._bounce[turn % 2])[:nbytes]


def _land(out: memoryview, start: int, memory: memoryview, transfer: Transfer) -> None:
    transfer.wait()
    part = out[start : start + len(memory)]
    part[:] = memory[: len(part)]
