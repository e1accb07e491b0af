"""Distributed Checkpoint's StorageWriter over page-aligned data files.

Memory in whole pages (`append`) is written without a copy, a tensor (`write`, or an item of a plan) is copied through
fixed buffers. Either way a tensor is flat ranges of elements in memory order, wherever they lie in the files.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tiered_zero.checkpoint.boxes import Box, flat_runs, permuted
from tiered_zero.checkpoint.data_files import Appended, DataWriter, staging_buffers
from tiered_zero.checkpoint.tag_manifest import DataFile, Part, TensorEntry
from tiered_zero.checkpoint.tensors import copy_flat, describe, dtype_name
from tiered_zero.errors import StoreError
from tiered_zero.io.engine import IOEngine
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.transfer import Transfer


class Piece(NamedTuple):
    """Elements `[start, stop)` of the tensor `key`, in memory order, `at` bytes into an extent."""

    key: str
    start: int
    stop: int
    at: int


@final
@dataclass(frozen=True, kw_only=True)
class WrittenFiles:
    """What one writer has written of a tag: its files, and of each tensor the parts in them, in any order."""

    files: tuple[DataFile, ...]
    tensors: dict[str, TensorEntry]


@final
class FileWriter(StorageWriter):
    """Writes the tensors of one tag. One thread drives it. After `finish_files` the data become durable,
    and are once `wait_durable` has returned."""

    def __init__(
        self, directory: Path, engine: IOEngine | None = None, *, needed_nbytes: int = 0, prefix: str = "data-00000"
    ) -> None:
        """As of DataWriter; `directory` is empty."""
        self._data = DataWriter(directory, engine, needed_nbytes=needed_nbytes, prefix=prefix)
        self._entries: dict[str, TensorEntry] = {}
        self._parts: dict[str, list[Part]] = {}
        self._free: list[memoryview] | None = None
        self._in_flight: deque[tuple[Transfer, memoryview]] = deque()
        self._staged: list[Piece] = []
        self._filled = 0

    def declare(self, key: str, entry: TensorEntry) -> None:
        """Enter a tensor; of one that is entered already, check that it is the same. Raises StoreError."""
        if self._entries.setdefault(key, entry) != entry:
            raise StoreError(f"{key} is written as two different tensors: {self._entries[key]} and {entry}.")
        self._parts.setdefault(key, [])

    def yield_to_training(self) -> None:
        """Take what training leaves of the processors, until `hurry`. Before anything is written."""
        self._data.yield_to_training()

    def hurry(self) -> None:
        """Yield no longer: something waits for what is written. Any thread; idempotent."""
        self._data.hurry()

    def append(self, memory: memoryview, pieces: Iterable[Piece] = ()) -> Appended:
        """Write whole pages without a copy; `pieces`: of declared tensors. The memory stays as it is until the transfer
        is done. Raises TransferError."""
        self._flush()
        return self._append(memory, pieces)

    def write(self, key: str, tensor: torch.Tensor, order: Sequence[int] | None = None) -> None:
        """Write a whole tensor, from any device, by copying. Raises TransferError, StoreError."""
        self.declare(key, describe(tensor.dtype, tensor.shape, order))
        self._write_box(key, Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)

    def finish_files(self) -> WrittenFiles:
        """End the writing and begin to make it durable; return what was written. Raises TransferError, StoreError,
        OSError."""
        self._flush()
        parts = {key: tuple(own) for key, own in self._parts.items()}
        return WrittenFiles(
            files=self._data.finish(),
            tensors={
                key: TensorEntry(dtype=entry.dtype, shape=entry.shape, order=entry.order, parts=parts[key])
                for key, entry in self._entries.items()
            },
        )

    def wait_durable(self) -> None:
        """Return when what `finish_files` ended is on the disk. Raises TransferError."""
        self._data.wait_durable()

    def close(self) -> None:
        """End the writing, whatever was written. Idempotent."""
        self._data.close()

    # What Distributed Checkpoint calls.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer belongs to one tag."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: files are named by rank at construction."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan, in their order; done when this returns, but for what is in flight."""
        for item in plan.items:
            if item.tensor_data is None:
                raise StoreError(
                    f"{item.index.fqn} is no tensor: a checkpoint holds tensors; put other values into client_state."
                )
            key, data = item.index.fqn, item.tensor_data
            self.declare(key, describe(data.properties.dtype, data.size))
        for item in plan.items:
            self._write_item(item, planner)
        self._flush()
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that each tensor of the plan was written. Raises StoreError."""
        for key in metadata.state_dict_metadata:
            if key not in self._entries:
                raise StoreError(f"{key} was planned, but not written.")
            _whole(key, self._entries[key], self._parts[key])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # made by TagWriter, never chosen from a path

    def _write_item(self, item: WriteItem, planner: SavePlanner) -> None:
        assert item.tensor_data is not None, item
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise StoreError(f"{item.index.fqn}: expected a tensor; found {type(tensor).__name__}.")
        chunk = item.tensor_data.chunk
        self._write_box(item.index.fqn, Box(tuple(chunk.offsets), tuple(chunk.sizes)), tensor)

    def _write_box(self, key: str, box: Box, tensor: torch.Tensor) -> None:
        """`tensor`: the values of `box`, in the tensor's own dimensions."""
        entry = self._entries[key]
        plain = tensor.layout is torch.strided and not tensor.is_meta
        if not plain or tuple(tensor.shape) != box.sizes or dtype_name(tensor.dtype) != entry.dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise StoreError(f"{key}: expected {box.sizes} {entry.dtype} in memory; found {found}.")
        tensor = tensor.detach()
        if entry.order is not None:
            box = Box(permuted(box.offsets, entry.order), permuted(box.sizes, entry.order))
            tensor = tensor.permute(entry.order)
        within = 0
        for start, stop in flat_runs(entry.memory_shape, box):
            self._stage(key, entry.itemsize, start, tensor, within, within + stop - start)
            within += stop - start

    def _stage(self, key: str, itemsize: int, start: int, tensor: torch.Tensor, begin: int, end: int) -> None:
        """Copy the elements `[begin, end)` of `tensor`, row-major, which are those from `start` on of the whole one."""
        while begin < end:
            buffer = self._buffer()
            self._filled = align_up(self._filled, itemsize)
            numel = min(end - begin, (len(buffer) - self._filled) // itemsize)
            if numel <= 0:
                self._flush()
                continue
            raw = torch.frombuffer(buffer, dtype=torch.uint8)[self._filled : self._filled + numel * itemsize]
            copy_flat(raw.view(tensor.dtype), tensor, begin, begin + numel)
            self._staged.append(Piece(key, start, start + numel, self._filled))
            self._filled += numel * itemsize
            begin, start = begin + numel, start + numel

    def _buffer(self) -> memoryview:
        """The staging buffer that is being filled: the last free one."""
        if self._free is None:
            self._free = staging_buffers()
        if not self._free:
            transfer, buffer = self._in_flight.popleft()
            transfer.wait()
            self._free.append(buffer)
        return self._free[-1]

    def _flush(self) -> None:
        """Append the staging buffer, with zeros up to a whole page."""
        if not self._staged or self._free is None:
            return
        buffer = self._free.pop()
        nbytes = align_up(self._filled, PAGE_NBYTES)
        buffer[self._filled : nbytes] = bytes(nbytes - self._filled)
        staged, self._staged, self._filled = self._staged, [], 0
        self._in_flight.append((self._append(buffer[:nbytes], staged).transfer, buffer))

    def _append(self, memory: memoryview, pieces: Iterable[Piece]) -> Appended:
        appended = self._data.append(memory)
        for key, start, stop, at in pieces:
            self._parts[key].append(Part(start, stop, appended.file, appended.offset + at))
        return appended


def join_files(written: Sequence[WrittenFiles]) -> tuple[tuple[DataFile, ...], dict[str, TensorEntry]]:
    """Join what several writers have written of one tag, in their order: all files, and each tensor with all of its
    parts. Raises StoreError unless the parts cover every tensor once, and the writers agree about it."""
    entries: dict[str, TensorEntry] = {}
    parts: dict[str, list[Part]] = {}
    num_files = 0
    for own in written:
        for key, entry in own.tensors.items():
            bare = replace(entry, parts=())
            if entries.setdefault(key, bare) != bare:
                raise StoreError(f"{key} is written as two different tensors: {entries[key]} and {bare}.")
            moved = (Part(part.start, part.stop, part.file + num_files, part.offset) for part in entry.parts)
            parts.setdefault(key, []).extend(moved)
        num_files += len(own.files)
    files = tuple(file for own in written for file in own.files)
    return files, {key: replace(entry, parts=_whole(key, entry, parts[key])) for key, entry in entries.items()}


def _whole(key: str, entry: TensorEntry, parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts in order, neighbours joined. Raises StoreError unless they cover the tensor once."""
    joined: list[Part] = []
    end = 0
    for part in sorted(parts):
        if part.start != end:
            raise StoreError(
                f"{key}: elements {min(end, part.start)} to {max(end, part.start)} are missing or doubled."
            )
        end = part.stop
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.file == part.file
            and last.offset + (last.stop - last.start) * entry.itemsize == part.offset
        ):
            joined[-1] = Part(last.start, part.stop, last.file, last.offset)
        else:
            joined.append(part)
    if end != entry.numel:
        raise StoreError(f"{key}: {end} of its {entry.numel} elements were written.")
    return tuple(joined)
