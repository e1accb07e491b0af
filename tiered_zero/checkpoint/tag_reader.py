"""What both readers of a checkpoint share: its manifest as metadata of Distributed Checkpoint (DCP), and DCP's calls.

FileReader reads a tag's own files, StoreReader the records of an in-place commit.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from tiered_zero.checkpoint.boxes import Box, boxes, unpermuted
from tiered_zero.checkpoint.places import PlacedPart
from tiered_zero.checkpoint.tag_manifest import Part, TagManifest, TensorEntry
from tiered_zero.checkpoint.tensors import torch_dtype
from tiered_zero.errors import StoreError

AnyPart = TypeVar("AnyPart", Part, PlacedPart)


@runtime_checkable
class GroupPlanner(Protocol):
    """A LoadPlanner that has memory for the tensors of some items at a time. What is in that memory is not used before
    the item is committed, and not at all after an error."""

    def groups(self, plan: LoadPlan) -> Iterable[Sequence[ReadItem]]:
        """The items of the plan. A group may be asked for before those of the last are read; but one without items says
        that all before it are to be committed before the next is asked for."""


class StoredBox(NamedTuple, Generic[AnyPart]):
    """A box of a tensor in memory order. `first`: its first element, counted from that of `part`, which has it."""

    part: AnyPart
    box: Box
    first: int


class TagReader(StorageReader, Generic[AnyPart]):
    """A StorageReader over one manifest. One thread drives it. `source`: what messages call the checkpoint."""

    def __init__(self, manifest: TagManifest, source: str) -> None:
        self.manifest = manifest
        self._source = source
        self._boxes: dict[str, list[StoredBox[AnyPart]]] = {}

    @abstractmethod
    def _parts(self, key: str) -> Sequence[AnyPart]:
        """The parts of a tensor of the manifest: in order, disjoint, covering it."""

    def _stored_boxes(self, key: str) -> list[StoredBox[AnyPart]]:
        if key not in self._boxes:
            shape = self.manifest.tensors[key].memory_shape
            found: list[StoredBox[AnyPart]] = []
            for part in self._parts(key):
                first = 0
                for box in boxes(shape, part.start, part.stop):
                    found.append(StoredBox(part, box, first))
                    first += box.numel
            self._boxes[key] = found
        return self._boxes[key]

    def _entry(self, item: ReadItem) -> TensorEntry:
        """The manifest's entry of the tensor that an item wants. Raises StoreError."""
        key = item.storage_index.fqn
        if item.type is not LoadItemType.TENSOR or key not in self.manifest.tensors:
            raise StoreError(f"{self._source} has no tensor {key!a}.")
        return self.manifest.tensors[key]

    def _stored_box(self, item: ReadItem) -> StoredBox[AnyPart]:
        """The box that an item wants a part of. Raises StoreError."""
        key, hint = item.storage_index.fqn, item.storage_index.index
        wanted = tuple(item.storage_index.offset or ())
        order, stored = self.manifest.tensors[key].order, self._stored_boxes(key)
        if hint is not None and 0 <= hint < len(stored) and unpermuted(stored[hint].box.offsets, order) == wanted:
            return stored[hint]
        for found in stored:
            if unpermuted(found.box.offsets, order) == wanted:
                return found
        raise StoreError(f"{self._source}: {key!a} has no part at {wanted}.")

    # What Distributed Checkpoint calls.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader belongs to one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors of the checkpoint, their parts as boxes."""
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

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def item_groups(plan: LoadPlan, planner: LoadPlanner) -> Iterable[Sequence[ReadItem]]:
    """The items of a plan in the groups of its planner; all at once where the planner has none."""
    return planner.groups(plan) if isinstance(planner, GroupPlanner) else [plan.items]
