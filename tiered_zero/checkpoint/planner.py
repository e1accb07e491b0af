"""What a load asks of Distributed Checkpoint: flat ranges of parameters, as boxes, into memory that is filled in turns.

Distributed Checkpoint finds which saved boxes meet which wanted ones, whatever the cuts of the run that saved and of
the one that loads; it never sees a tier or a sub-group.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader

from tiered_zero.checkpoint.boxes import boxes, flat_start, permuted, row_major_strides, unpermuted
from tiered_zero.errors import InternalError
from tiered_zero.transfer import Completion


@dataclass(frozen=True, kw_only=True)
class Target:
    """Elements [start, stop), in memory order, of the tensor `key` of `shape`, and where they go: `values`, 1-D, of any
    dtype and on any device. `order`: the dimensions from the slowest to the fastest in memory; None: row-major."""

    key: str
    start: int
    stop: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    values: torch.Tensor

    def pieces(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Cut into boxes of the tensor: each with its elements, a view in the tensor's own dimensions."""
        memory_shape = permuted(self.shape, self.order)
        strides = row_major_strides(memory_shape)
        inverse = unpermuted(range(len(self.shape)), self.order)
        found = []
        for box in boxes(memory_shape, self.start, self.stop):
            first = self.values.storage_offset() + flat_start(memory_shape, box.offsets) - self.start
            view = self.values.as_strided(box.sizes, strides, first).permute(inverse)
            chunk = ChunkStorageMetadata(
                offsets=torch.Size(unpermuted(box.offsets, self.order)),
                sizes=torch.Size(unpermuted(box.sizes, self.order)),
            )
            found.append((chunk, view))
        return found


@final
@dataclass(kw_only=True, eq=False)
class Group:
    """Targets that have their memory, and may be read to it at once. `filled`: completes once all of them are read;
    `num_left`: items until then, the planner's."""

    targets: Sequence[Target]
    filled: Completion = field(default_factory=Completion)
    num_left: int = 0


@final
class TierLoadPlanner(LoadPlanner):
    """Plans reads group by group, as their targets get memory, while those before it are read. Driver thread."""

    def __init__(self, groups: Iterable[Group | None], metadata: Metadata) -> None:
        """`groups`: None: when the next one is asked for, all before it are filled. `metadata`: of the checkpoint."""
        self._groups, self._metadata = groups, metadata
        self._views: dict[tuple[str, torch.Size], torch.Tensor] = {}
        self._group_of: dict[tuple[str, torch.Size], Group] = {}

    def set_up_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: targets say where everything goes."""

    def create_local_plan(self) -> LoadPlan:
        """The items are planned in `groups`."""
        return LoadPlan([])

    def groups(self, plan: LoadPlan) -> Iterator[Sequence[ReadItem]]:
        """Yield the items of each group. Raises InternalError for elements that the checkpoint has not: its keys and
        parts are checked before."""
        for group in self._groups:
            self._views.clear()
            items: list[ReadItem] = []
            for target in group.targets if group is not None else ():
                entry = self._metadata.state_dict_metadata.get(target.key)
                if not isinstance(entry, TensorStorageMetadata):
                    raise InternalError(f"{target.key} was expected in the checkpoint. Load another one.")
                pieces = target.pieces()
                self._views.update({(target.key, chunk.offsets): view for chunk, view in pieces})
                own = create_read_items_for_chunk_list(target.key, entry, [chunk for chunk, _ in pieces])
                if sum(torch.Size(item.lengths).numel() for item in own) != target.stop - target.start:
                    raise InternalError(f"{target.key}: elements {target.start} to {target.stop} were expected.")
                items += own
            if group is None:
                yield []
                self._group_of.clear()
            elif items:
                group.num_left = len(items)
                self._group_of.update(dict.fromkeys(self._views, group))
                yield items
            else:
                group.filled.complete()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """No object is kept as bytes: such a checkpoint is none of this project's."""
        raise InternalError(f"{read_item.storage_index.fqn} was expected to be a tensor; found bytes.")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return where the item goes."""
        index = read_item.dest_index
        assert index.offset is not None, "every item has its box"
        view = self._views[index.fqn, index.offset]
        for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, first, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Count what its group still waits for: `resolve_tensor` has given the target itself."""
        assert read_item.dest_index.offset is not None, "every item has its box"
        group = self._group_of[read_item.dest_index.fqn, read_item.dest_index.offset]
        group.num_left -= 1
        if not group.num_left:
            group.filled.complete()


def read_groups(reader: StorageReader, metadata: Metadata, groups: Iterable[Group | None]) -> None:
    """Read what `groups` ask for. Raises CorruptionError, StoreError and TransferError."""
    planner = TierLoadPlanner(groups, metadata)
    reader.read_data(planner.create_local_plan(), planner).wait()
