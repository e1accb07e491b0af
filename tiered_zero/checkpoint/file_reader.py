"""Distributed Checkpoint's StorageReader over page-aligned data files.

Items are read in the order of the files, within what the planner calls a group (`groups`) if it has any: whole chunks,
in large sequential reads to buffers, are verified, and what belongs to an item is copied to where the item goes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tiered_zero.checkpoint.boxes import Box, boxes, flat_start, permuted
from tiered_zero.checkpoint.data_reader import READ_BLOCKS, DataReader, Run
from tiered_zero.checkpoint.directory import read_manifest
from tiered_zero.checkpoint.tag_manifest import Part
from tiered_zero.checkpoint.tag_reader import TagReader, item_groups
from tiered_zero.checkpoint.tensors import copy_values, torch_dtype
from tiered_zero.errors import StoreError
from tiered_zero.io.engine import IOEngine
from tiered_zero.io.select import select_reader


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
class FileReader(TagReader[Part]):
    """Reads a tag. One thread drives it; `close` ends it, as does the end of a `with` block."""

    def __init__(self, tag_dir: str | os.PathLike[str], engine: IOEngine | None = None) -> None:
        """`engine`: None: one that is chosen by reading the files. Raises StoreError for what is no whole tag."""
        self._directory = Path(tag_dir)
        super().__init__(read_manifest(self._directory), str(self._directory))
        self._engine, self._own_engine = engine, engine is None
        self._reader: DataReader | None = None
        self._entered = False

    def __enter__(self) -> FileReader:
        """Keep the files open between reads, until the end of the block."""
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and the engine if it is the reader's own. Idempotent, so that it can be called again after
        an interrupt; a later read opens them again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._own_engine and self._engine is not None:
            self._engine.close()
            self._engine = None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, group by group, each in the order of the files.

        Raises CorruptionError, TransferError and StoreError.
        """
        try:
            self._read_groups(item_groups(plan, planner), planner)
        finally:
            if not self._entered:
                self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _parts(self, key: str) -> Sequence[Part]:
        return self.manifest.tensors[key].parts

    def _place(self, item: ReadItem) -> _Placed:
        entry = self._entry(item)
        part, box, first = self._stored_box(item)
        offset = part.offset + first * entry.itemsize
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

    def _read_groups(self, groups: Iterable[Sequence[ReadItem]], planner: LoadPlanner) -> None:
        """Read group after group, windows of the next under those of the last. A group without items: all before it are
        to be committed before the next is asked for."""
        reads: deque[_GroupRead] = deque()

        def wanted() -> Iterator[Run | None]:
            for items in groups:
                group = _GroupRead([self._place(item) for item in items], planner)
                for window in self._data_reader().windows_of(group.runs) if group.runs else ():
                    reads.append(group)
                    yield window
                if not items:
                    yield None

        if not self.manifest.files:  # then no tensor has elements
            deque(wanted(), maxlen=0)
            return
        with closing(self._data_reader().read(wanted())) as windows:
            for run, memory in windows:
                reads.popleft().take(run, memory)

    def _data_reader(self) -> DataReader:
        if self._reader is None:
            if self._engine is None:
                self._engine = select_reader(
                    *(self._directory / file.name for file in self.manifest.files), settings=READ_BLOCKS
                ).engine
            self._reader = DataReader(self._directory, self.manifest.files, self._engine)
        return self._reader


class _Filling(NamedTuple):
    """An item that is being read. `target`: `tensor` in memory order."""

    placed: _Placed
    tensor: torch.Tensor
    target: torch.Tensor


@final
class _GroupRead:
    """Items of one group, while their windows come in the order of the files."""

    def __init__(self, items: Sequence[_Placed], planner: LoadPlanner) -> None:
        """Commit the items without elements."""
        self._planner = planner
        self._active: list[_Filling] = []
        self._waiting: deque[_Filling] = deque()
        for placed in sorted(items, key=lambda item: item.run):
            tensor = planner.resolve_tensor(placed.item)
            if placed.window.numel:
                self._waiting.append(_Filling(placed, tensor, _memory_of(placed, tensor)))
            else:
                planner.commit_tensor(placed.item, tensor)
        self.runs = [filling.placed.run for filling in self._waiting]

    def take(self, run: Run, memory: memoryview) -> None:
        """Copy to the items what belongs to them, and commit those that end in the window."""
        while self._waiting and self._waiting[0].placed.run < Run(run.file, run.stop, 0):
            self._active.append(self._waiting.popleft())
        unfinished = []
        for filling in self._active:
            _copy_from_file(filling.placed, filling.target, run, memory)
            if filling.placed.run.stop <= run.stop:
                self._planner.commit_tensor(filling.placed.item, filling.tensor)
            else:
                unfinished.append(filling)
        self._active = unfinished


def _memory_of(placed: _Placed, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that takes the window, in memory order. Raises StoreError for another shape."""
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
