"""Distributed Checkpoint's StorageWriter and StorageReader over page-aligned data files.

Two kinds of planner. One that knows its memory (it has `extents`) gives whole pages, which are written without a copy;
of any other `resolve_data` is asked item by item, and what it gives is copied through fixed buffers. Reading is in the
order of the files, within what the planner calls a group (`groups`) if it has any.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tiered_zero.checkpoint.boxes import Box, boxes, flat_runs, flat_start
from tiered_zero.checkpoint.data_files import Appended, DataReader, DataWriter, Run, staging_buffers
from tiered_zero.checkpoint.directory import read_manifest
from tiered_zero.checkpoint.manifest import ITEMSIZES, DataFile, Part, TensorEntry
from tiered_zero.errors import StoreError, TieredZeroError
from tiered_zero.io.engine import IOEngine
from tiered_zero.io.select import select_reader
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
class Extent:
    """Whole pages of host memory, at an address in whole pages, and what of them is which tensor's."""

    memory: memoryview
    pieces: Sequence[Piece]


@runtime_checkable
class ExtentPlanner(Protocol):
    """A SavePlanner that knows its memory."""

    def extents(self, plan: SavePlan) -> Generator[Extent, Transfer, None]:
        """Yields each extent, is sent its transfer, and keeps the extent's memory as it is until that is done."""


@runtime_checkable
class GroupPlanner(Protocol):
    """A LoadPlanner that has the tensors of some items at a time."""

    def groups(self, plan: LoadPlan) -> Iterable[Sequence[ReadItem]]:
        """The items of the plan; when the next group is asked for, all of the last one were read and committed."""


@contextmanager
def our_errors() -> Iterator[None]:
    """Raise what went wrong in a call of Distributed Checkpoint itself, in place of its CheckpointException."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        ours = [cause for cause in causes if isinstance(cause, TieredZeroError) or not isinstance(cause, Exception)]
        raise (ours or causes)[0] from None


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32". Raises StoreError for a dtype that a checkpoint cannot hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise StoreError(f"A checkpoint cannot hold a tensor of {dtype}; it can hold {', '.join(sorted(ITEMSIZES))}.")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a checked manifest's entry. Raises StoreError where this PyTorch has none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"PyTorch {torch.__version__} has no dtype {name}, which this checkpoint needs.")
    return dtype


def permuted(values: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """`values` of the dimensions in memory order."""
    return tuple(values) if order is None else tuple(values[dimension] for dimension in order)


def _window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


@final
class FileWriter(StorageWriter):
    """Writes the tensors of one tag. One thread drives it. `finish_files` makes the data durable."""

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

    def declare(
        self, key: str, dtype: torch.dtype, shape: Sequence[int], order: Sequence[int] | None = None
    ) -> TensorEntry:
        """Enter a tensor; of one that is entered already, check that it is the same. Raises StoreError."""
        entry = TensorEntry(dtype=dtype_name(dtype), shape=tuple(shape), order=None if order is None else tuple(order))
        if self._entries.setdefault(key, entry) != entry:
            raise StoreError(f"{key} is written as two different tensors: {self._entries[key]} and {entry}.")
        self._parts.setdefault(key, [])
        return entry

    def append(self, memory: memoryview, pieces: Iterable[Piece] = ()) -> Appended:
        """Write whole pages without a copy; `pieces`: of declared tensors. The memory stays as it is until the transfer
        is done. Raises TransferError."""
        self._flush()
        return self._append(memory, pieces)

    def write(self, key: str, tensor: torch.Tensor, order: Sequence[int] | None = None) -> None:
        """Write a whole tensor, from any device, by copying. Raises TransferError, StoreError."""
        self.declare(key, tensor.dtype, tensor.shape, order)
        self._write_box(key, Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)

    def finish_files(self) -> tuple[tuple[DataFile, ...], dict[str, TensorEntry]]:
        """Make the data durable; the files and tensors for the manifest. Raises TransferError, StoreError, OSError."""
        self._flush()
        tensors = {key: self._whole(key, entry) for key, entry in self._entries.items()}
        return self._data.finish(), tensors

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
        orders: Mapping[str, Sequence[int]] = getattr(planner, "orders", {})
        for item in plan.items:
            if item.tensor_data is None:
                raise StoreError(
                    f"{item.index.fqn} is no tensor: a checkpoint holds tensors; put other values into client_state."
                )
            key, data = item.index.fqn, item.tensor_data
            self.declare(key, data.properties.dtype, data.size, orders.get(key))
        if isinstance(planner, ExtentPlanner):
            self._write_extents(planner.extents(plan))
        else:
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
            self._whole(key, self._entries[key])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # made by TagWriter, never chosen from a path

    def _write_extents(self, extents: Generator[Extent, Transfer, None]) -> None:
        try:
            extent = next(extents, None)
            while extent is not None:
                try:
                    extent = extents.send(self.append(extent.memory, extent.pieces).transfer)
                except StopIteration:
                    extent = None
        finally:
            extents.close()

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
            _copy_flat(raw.view(tensor.dtype), tensor, begin, begin + numel)
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

    def _whole(self, key: str, entry: TensorEntry) -> TensorEntry:
        """The entry with its parts in order, neighbours joined. Raises StoreError unless they cover the tensor once."""
        joined: list[Part] = []
        end = 0
        for part in sorted(self._parts[key]):
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
        return TensorEntry(dtype=entry.dtype, shape=entry.shape, order=entry.order, parts=tuple(joined))


def _copy_flat(into: torch.Tensor, tensor: torch.Tensor, begin: int, end: int) -> None:
    """`into` [end - begin] = the row-major elements `[begin, end)` of `tensor`, which may have any strides."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        _copy_bytes(into, tensor.view(-1)[begin:end])
        return
    at = 0
    for box in boxes(tensor.shape, begin, end):
        into[at : at + box.numel].view(box.sizes).copy_(tensor[_window(box)])
        at += box.numel


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    """`values`: on the CPU, of the same shape."""
    plain = into.is_contiguous() and values.is_contiguous() and into.device.type == "cpu"
    if plain and into.dtype == values.dtype:
        _copy_bytes(into, values)
    else:
        into.copy_(values)


def _copy_bytes(into: torch.Tensor, values: torch.Tensor) -> None:
    """Contiguous CPU memory to such memory, on this thread alone: `copy_` shares 2 MiB among all of PyTorch's threads,
    and waits for them, which on busy processors took 2.5 times as long."""
    ctypes.memmove(into.data_ptr(), values.data_ptr(), values.nbytes)


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
        self._boxes: dict[str, list[tuple[Part, Box, int]]] = {}

    def __enter__(self) -> FileReader:
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
        """Read the items of a plan, group by group, each in the order of the files.

        Raises CorruptionError, TransferError and StoreError.
        """
        groups = planner.groups(plan) if isinstance(planner, GroupPlanner) else [plan.items]
        try:
            for items in groups:
                self._read_group([self._place(item) for item in items], planner)
        finally:
            if self._own_engine:
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
        if hint is None or not 0 <= hint < len(stored) or _unpermuted(stored[hint][1].offsets, entry.order) != wanted:
            starts = [torch.Size(_unpermuted(box.offsets, entry.order)) for _, box, _ in stored]
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


def _unpermuted(values: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """`values` in memory order -> of the tensor's dimensions."""
    if order is None:
        return tuple(values)
    found = [0] * len(order)
    for value, dimension in zip(values, order, strict=True):
        found[dimension] = value
    return tuple(found)


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
            _copy(target[of_target], values[of_box])
