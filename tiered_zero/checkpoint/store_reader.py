"""An in-place commit as Distributed Checkpoint reads it, in the keys of the portable form."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import final

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tiered_zero.checkpoint.boxes import Box, flat_start, permuted, row_major_strides
from tiered_zero.checkpoint.committed import Commit, CommittedFiles, open_stores, owner_of, refused
from tiered_zero.checkpoint.places import SOURCE_ITEMSIZES, PlacedPart, RecordName, Source
from tiered_zero.checkpoint.tag_manifest import TensorEntry
from tiered_zero.checkpoint.tag_reader import TagReader, item_groups
from tiered_zero.checkpoint.tensors import torch_dtype
from tiered_zero.errors import StoreError
from tiered_zero.optim.state_formats import join_master
from tiered_zero.store.manifest import Record


@final
class StoreReader(TagReader[PlacedPart]):
    """Reads the newest commit of a run, in the swap directories of all its ranks. One thread drives it; `close` ends
    it, as does the end of a `with` block. `manifest`: of the commit; `places`: of its tensors."""

    def __init__(self, path: str | os.PathLike[str], own_runs: Container[str] = ()) -> None:
        """`path`: any directory of the run. `own_runs`: ids of the stores of this run's ranks, which make no commit
        while this is open. Raises StoreError: nothing committed, damaged, not all of it here, or its owner lives
        (unless it is this run)."""
        commit = Commit.read(Path(owner_of(Path(path)).paths[0]))
        super().__init__(commit.manifest, f"The commit of step {commit.manifest.step}")
        self.places = commit.places
        with ExitStack() as resources:
            stores = open_stores(commit.stores, commit, resources, own_runs)
            with refused(commit.path):
                self._records = [_find(stores, name) for name in self.places.records]
                self._check()
            self._resources = resources.pop_all()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._resources.close()

    def read(self, source: Source, nbytes: int) -> bytearray:
        """`nbytes` from a source, verified. Raises CorruptionError, StoreError."""
        store, record = self._records[source.record]
        return store.read(record, source.offset, nbytes)

    def _check(self) -> None:
        """Raises ValueError where a tensor does not lie inside of its records."""
        for key, place in self.places.places.items():
            entry, itemsizes = self.manifest.tensors[key], SOURCE_ITEMSIZES[place.form]
            for part in place.parts:
                for source, itemsize in zip(part.sources, itemsizes, strict=True):
                    nbytes = (part.stop - part.start) * (itemsize or entry.itemsize)
                    if source.offset + nbytes > self._records[source.record][1].extent_nbytes:
                        raise ValueError(f"{key[:200]!a} lies outside of its record")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, in its order. Raises CorruptionError and StoreError."""
        for items in item_groups(plan, planner):
            for item in items:
                self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _parts(self, key: str) -> Sequence[PlacedPart]:
        return self.places.places[key].parts

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        key = item.storage_index.fqn
        entry = self._entry(item)
        target = planner.resolve_tensor(item).detach()
        window = Box(permuted(item.storage_offsets, entry.order), permuted(item.lengths, entry.order))
        if window.numel:
            part, box, first = self._stored_box(item)
            last = [at + size - 1 for at, size in zip(window.offsets, window.sizes, strict=True)]
            start, stop = flat_start(box.sizes, window.offsets), flat_start(box.sizes, last) + 1
            values = self._elements(key, entry, part, first + start, first + stop)
            own = target if entry.order is None else target.permute(entry.order)
            if tuple(own.shape) != window.sizes:
                raise StoreError(f"{key}: expected {window.sizes}; found {tuple(own.shape)}.")
            own.copy_(values.as_strided(window.sizes, row_major_strides(box.sizes)))
        planner.commit_tensor(item, target)

    def _elements(self, key: str, entry: TensorEntry, part: PlacedPart, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop), counted from the part's first: 1-D of the entry's dtype."""
        dtype, form = torch_dtype(entry.dtype), self.places.places[key].form

        def read(source: Source, own: torch.dtype) -> torch.Tensor:
            offset, nbytes = source.offset + start * own.itemsize, (stop - start) * own.itemsize
            return torch.frombuffer(self.read(Source(source.record, offset), nbytes), dtype=own)

        if form == "joined":
            remainder, param, marks = part.sources
            return join_master(
                read(param, torch.bfloat16), read(remainder, torch.int16), read(marks, torch.float32).signbit()
            )
        if form == "rounded":
            return read(part.sources[0], torch.float32).to(dtype)
        values = read(part.sources[0], dtype)
        return values.abs() if form == "magnitude" else values


def _find(stores: Sequence[CommittedFiles], name: RecordName) -> tuple[CommittedFiles, Record]:
    """Raises ValueError."""
    store = stores[name.store]
    if name.name not in store.records:
        raise ValueError(f"there is no record {name.name[:80]!a}")
    return store, store.records[name.name]
