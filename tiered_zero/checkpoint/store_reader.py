"""An in-place commit as Distributed Checkpoint reads it, in the keys of the portable form."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from typing import final

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tiered_zero.checkpoint.boxes import Box, flat_start, permuted, row_major_strides
from tiered_zero.checkpoint.committed import CommittedState
from tiered_zero.checkpoint.manifest import TensorEntry
from tiered_zero.checkpoint.places import PlacedPart, Source
from tiered_zero.checkpoint.tag_reader import TagReader, item_groups
from tiered_zero.checkpoint.tensors import torch_dtype
from tiered_zero.errors import StoreError
from tiered_zero.optim.state_formats import join_master


@final
class StoreReader(TagReader[PlacedPart]):
    """Reads the newest commit of a run. One thread drives it; `close` ends it, as does the end of a `with`
    block. `manifest`: of the commit."""

    def __init__(self, path: str | os.PathLike[str], own_runs: Container[str] = ()) -> None:
        """As `CommittedState.open`. Raises StoreError."""
        self._state = CommittedState.open(path, own_runs)
        super().__init__(self._state.manifest, f"The commit of step {self._state.step}")

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._state.close()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, in its order. Raises CorruptionError and StoreError."""
        for items in item_groups(plan, planner):
            for item in items:
                self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _parts(self, key: str) -> Sequence[PlacedPart]:
        return self._state.places.places[key].parts

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
        dtype, form = torch_dtype(entry.dtype), self._state.places.places[key].form

        def read(source: Source, own: torch.dtype) -> torch.Tensor:
            offset, nbytes = source.offset + start * own.itemsize, (stop - start) * own.itemsize
            return torch.frombuffer(self._state.read(Source(source.record, offset), nbytes), dtype=own)

        if form == "joined":
            remainder, param, marks = part.sources
            return join_master(
                read(param, torch.bfloat16), read(remainder, torch.int16), read(marks, torch.float32).signbit()
            )
        if form == "rounded":
            return read(part.sources[0], torch.float32).to(dtype)
        values = read(part.sources[0], dtype)
        return values.abs() if form == "magnitude" else values
