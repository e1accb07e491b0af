"""An in-place commit as Distributed Checkpoint reads it, in the keys of the portable form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tiered_zero.checkpoint.boxes import Box, boxes, flat_start
from tiered_zero.checkpoint.committed import CommittedState
from tiered_zero.checkpoint.manifest import TensorEntry
from tiered_zero.checkpoint.places import PlacedPart, Source
from tiered_zero.checkpoint.storage import GroupPlanner, torch_dtype
from tiered_zero.errors import StoreError
from tiered_zero.optim.state_formats import join_master


@final
class StoreReader(StorageReader):
    """Reads the newest commit of a swap directory. One thread drives it; `close` ends it, as does the end of a `with`
    block. `manifest`: of the commit."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`path`: any directory of the run. Raises StoreError."""
        self._state = CommittedState.open(path)
        self.manifest = self._state.manifest
        self._boxes: dict[str, list[tuple[PlacedPart, Box, int]]] = {}

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._state.close()

    # What Distributed Checkpoint calls.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader belongs to one commit."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors of the commit, their parts as boxes."""
        found: dict[str, Any] = {}
        for key, entry in self.manifest.tensors.items():
            chunks = [
                ChunkStorageMetadata(
                    offsets=torch.Size(_unpermuted(box.offsets, entry.order)),
                    sizes=torch.Size(_unpermuted(box.sizes, entry.order)),
                )
                for _, box, _ in self._stored_boxes(key)
            ]
            found[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=torch_dtype(entry.dtype)), size=torch.Size(entry.shape), chunks=chunks
            )
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the manifest was read at construction."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, in its order. Raises CorruptionError and StoreError."""
        for items in planner.groups(plan) if isinstance(planner, GroupPlanner) else [plan.items]:
            for item in items:
                self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        key = item.storage_index.fqn
        if item.type is not LoadItemType.TENSOR or key not in self.manifest.tensors:
            raise StoreError(f"The commit of step {self.manifest.step} has no tensor {key!a}.")
        entry = self.manifest.tensors[key]
        target = planner.resolve_tensor(item).detach()
        window = Box(_permuted(item.storage_offsets, entry.order), _permuted(item.lengths, entry.order))
        if window.numel:
            part, box, first = self._stored_box(key, entry, item.storage_index.offset)
            last = [at + size - 1 for at, size in zip(window.offsets, window.sizes, strict=True)]
            start, stop = flat_start(box.sizes, window.offsets), flat_start(box.sizes, last) + 1
            values = self._elements(key, entry, part, first + start, first + stop)
            own = target if entry.order is None else target.permute(entry.order)
            if tuple(own.shape) != window.sizes:
                raise StoreError(f"{key}: expected {window.sizes}; found {tuple(own.shape)}.")
            own.copy_(values.as_strided(window.sizes, _row_major(box.sizes)))
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

    def _stored_box(self, key: str, entry: TensorEntry, wanted: Sequence[int] | None) -> tuple[PlacedPart, Box, int]:
        for part, box, first in self._stored_boxes(key):
            if _unpermuted(box.offsets, entry.order) == tuple(wanted or ()):
                return part, box, first
        raise StoreError(f"The commit of step {self.manifest.step}: {key!a} has no part at {tuple(wanted or ())}.")

    def _stored_boxes(self, key: str) -> list[tuple[PlacedPart, Box, int]]:
        """Each box of a tensor in memory order, with its part and its first element in that."""
        if key not in self._boxes:
            entry, found = self.manifest.tensors[key], []
            for part in self._state.places.places[key].parts:
                first = 0
                for box in boxes(entry.memory_shape, part.start, part.stop):
                    found.append((part, box, first))
                    first += box.numel
            self._boxes[key] = found
        return self._boxes[key]


def _permuted(values: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """`values` of the tensor's dimensions -> in memory order."""
    return tuple(values) if order is None else tuple(values[dimension] for dimension in order)


def _unpermuted(values: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """`values` in memory order -> of the tensor's dimensions."""
    if order is None:
        return tuple(values)
    found = [0] * len(order)
    for value, dimension in zip(values, order, strict=True):
        found[dimension] = value
    return tuple(found)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if sizes else ()
