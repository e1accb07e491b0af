"""Distributed Checkpoint's StorageReader over page-aligned data files.

Items are read in the order of the files, within what the planner calls a group (`groups`) if it has any: whole chunks,
verified, in large sequential reads. Of each buffer what belongs to an item is copied to where the item goes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

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

from tiered_zero.checkpoint.boxes import Box, boxes, flat_start, permuted, unpermuted
from tiered_zero.checkpoint.data_files import DataReader, Run
from tiered_zero.checkpoint.directory import read_manifest
from tiered_zero.checkpoint.manifest import Part
from tiered_zero.checkpoint.tensors import copy_values, torch_dtype
from tiered_zero.errors import StoreError
from tiered_zero.io.engine import IOEngine
from tiered_zero.io.select import select_reader


@runtime_checkable
class GroupPlanner(Protocol):
    """A LoadPlanner that has the tensors of some items at a time."""

    def groups(self, plan: LoadPlan) -> Iterable[Sequence[ReadItem]]:
        """The items of the plan; when the next group is asked for, all of the last one were read and committed."""


@final
@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A read item. `box`: the stored box in memory order, at byte `offset` of the file; `window`: the part of it that
    is wanted, in indices of the box; `run`: the bytes from its first element to its last; `order`: of the dimensions
    in memory."""

    item: ReadItem
    offset: int
    box: Box
    window: Box
    run: Run
    dtype: torch.dtype
    order: tuple[int, ...] | None


@final
class FileReader(StorageReader):
    """Reads a tag. One thread drives it; `close` ends it, as does the end of a `with` block."""

    def __init__(self, tag_dir: str | os.PathLike[str], engine: IOEngine | None = None) -> None:
        """`engine`: None: one that is chosen by reading the files. Raises StoreError for what is no whole tag."""
        self._directory = Path(tag_dir)
        self.manifest = read_manifest(self._directory)
        self._engine, self._own_engine = engine, engine is None
        self._reader: DataReader | None = None
        self._entered = False
        self._boxes: dict[str, list[tuple[Part, Box, int]]] = {}

    def __enter__(self) -> FileReader:
        """Keep the files open between reads, until the end of the block."""
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and the engine if it is the reader's own. Idempotent; a later read opens them again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            if self._own_engine and self._engine is not None:
                self._engine.close()
                self._engine = None

    # What Distributed Checkpoint calls.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader belongs to one tag."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors of the tag, their parts as boxes."""
        found: dict[str, Any] = {}
        for key, entry in self.manifest.tensors.items():
            chunks = [
                ChunkStorageMetadata(
                    offsets=torch.Size(unpermuted(box.offsets, entry.order)),
                    sizes=torch.Size(unpermuted(box.sizes, entry.order)),
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
        """Read the items of a plan, group by group, each in the order of the files.

        Raises CorruptionError, TransferError and StoreError.
        """
        groups = planner.groups(plan) if isinstance(planner, GroupPlanner) else [plan.items]
        try:
            for items in groups:
                self._read_group([self._place(item) for item in items], planner)
        finally:
            if not self._entered:
                self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def _stored_boxes(self, key: str) -> list[tuple[Part, Box, int]]:
        """Each box of the tensor in memory order, with its part and its byte offset in the part's file."""
        if key not in self._boxes:
            entry = self.manifest.tensors[key]
            found = []
            for part in entry.parts:
                offset = part.offset
                for box in boxes(entry.memory_shape, part.start, part.stop):
                    found.append((part, box, offset))
                    offset += box.numel * entry.itemsize
            self._boxes[key] = found
        return self._boxes[key]

    def _place(self, item: ReadItem) -> _Placed:
        key = item.storage_index.fqn
        if item.type is not LoadItemType.TENSOR or key not in self.manifest.tensors:
            raise StoreError(f"{self._directory} has no tensor {key!a}.")
        entry = self.manifest.tensors[key]
        stored = self._stored_boxes(key)
        wanted = item.storage_index.offset
        hint = item.storage_index.index
        if hint is None or not 0 <= hint < len(stored) or unpermuted(stored[hint][1].offsets, entry.order) != wanted:
            starts = [torch.Size(unpermuted(box.offsets, entry.order)) for _, box, _ in stored]
            if wanted not in starts:
                raise StoreError(f"{self._directory}: {key!a} has no part at {tuple(wanted or ())}.")
            hint = starts.index(wanted)
        part, box, offset = stored[hint]
        window = Box(permuted(item.storage_offsets, entry.order), permuted(item.lengths, entry.order))
        last = [at + size - 1 for at, size in zip(window.offsets, window.sizes, strict=True)]
        start = offset + flat_start(box.sizes, window.offsets) * entry.itemsize
        stop = offset + (flat_start(box.sizes, last) + 1) * entry.itemsize
        return _Placed(
            item=item,
            offset=offset,
            box=box,
            window=window,
            run=Run(part.file, start, stop),
            dtype=torch_dtype(entry.dtype),
            order=entry.order,
        )

    def _read_group(self, placed: list[_Placed], planner: LoadPlanner) -> None:
        waiting = deque(sorted((item for item in placed if item.window.numel), key=lambda item: item.run))
        for item in placed:
            if not item.window.numel:
                planner.commit_tensor(item.item, planner.resolve_tensor(item.item))
        if not waiting:
            return
        reader = self._data_reader()
        active: list[tuple[_Placed, torch.Tensor, torch.Tensor]] = []
        with closing(reader.read(reader.chunks_of([item.run for item in waiting]))) as runs:
            for run, memory in runs:
                while waiting and waiting[0].run < Run(run.file, run.stop, 0):
                    item = waiting.popleft()
                    tensor = planner.resolve_tensor(item.item)
                    active.append((item, tensor, _target(item, tensor)))
                unfinished = []
                for item, tensor, target in active:
                    _copy_from_file(item, target, run, memory)
                    if item.run.stop <= run.stop:
                        planner.commit_tensor(item.item, tensor)
                    else:
                        unfinished.append((item, tensor, target))
                active = unfinished

    def _data_reader(self) -> DataReader:
        if self._reader is None:
            if self._engine is None:
                self._engine = select_reader(*(self._directory / file.name for file in self.manifest.files)).engine
            self._reader = DataReader(self._directory, self.manifest.files, self._engine)
        return self._reader


def _target(placed: _Placed, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that takes the window, in memory order. Raises StoreError for another shape or dtype."""
    tensor = tensor.detach()
    if placed.order is not None:
        tensor = tensor.permute(placed.order)
    if tuple(tensor.shape) != placed.window.sizes:
        raise StoreError(
            f"{placed.item.storage_index.fqn}: expected {placed.window.sizes}; found {tuple(tensor.shape)}."
        )
    return tensor


def _copy_from_file(placed: _Placed, target: torch.Tensor, run: Run, memory: memoryview) -> None:
    """Copy what of the window lies in `memory`, the bytes of `run`: at most 2 * dimensions - 1 boxes."""
    itemsize = placed.dtype.itemsize
    first = max(0, (run.start - placed.offset) // itemsize)
    last = min(placed.box.numel, (run.stop - placed.offset) // itemsize)
    if first >= last:
        return
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    at = placed.offset + first * itemsize - run.start
    for box in boxes(placed.box.sizes, first, last):
        values = raw[at : at + box.numel * itemsize].view(placed.dtype).view(box.sizes)
        at += box.numel * itemsize
        low = [max(a, b) for a, b in zip(box.offsets, placed.window.offsets, strict=True)]
        high = [
            min(a + size, b + length) for a, size, b, length in zip(box.offsets, box.sizes, *placed.window, strict=True)
        ]
        if all(a < b for a, b in zip(low, high, strict=True)):
            of_box = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.offsets, strict=True))
            of_target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, placed.window.offsets, strict=True))
            copy_values(target[of_target], values[of_box])
