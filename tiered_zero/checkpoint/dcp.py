"""Read tags with PyTorch's Distributed Checkpoint (DCP), for programs without an engine:
`torch.distributed.checkpoint.load(..., storage_reader=DcpReader(tag))`. Nothing in this package imports this file."""

from __future__ import annotations

import os
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

from tiered_zero.checkpoint.index import torch_dtype
from tiered_zero.checkpoint.load import TensorReader
from tiered_zero.checkpoint.tag import find_checkpoint, open_reader
from tiered_zero.errors import StoreError


@final
class DcpReader(StorageReader):
    """Reads a tag, or a run's newest in-place commit. [Note: Portable form] describes the keys of tensors. One thread
    uses it; the end of a `with` block closes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the checkpoint at `path`: a tag, a directory of tags, or a run's swap directory. Raises StoreError."""
        self.reader: TensorReader = open_reader(find_checkpoint(path))

    def __enter__(self) -> DcpReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.reader.close()

    # -- called by Distributed Checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: this reader reads one checkpoint only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return a description of all tensors of the checkpoint, each as one chunk."""
        found: dict[str, Any] = {}
        for key, entry in self.reader.manifest.tensors.items():
            size = torch.Size(entry.shape)
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=torch_dtype(entry.dtype))
            found[key] = TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest was read at construction."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan` into the planner's tensors. Raises CorruptionError, TransferError and StoreError."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            found = self._read(item)
            if target.is_floating_point() and not found.is_floating_point():  # codes: another key has their scales
                raise StoreError(
                    f"{item.storage_index.fqn} was expected to hold floats; it is {found.dtype}. Load the checkpoint "
                    "into a run with tiered_zero.state_format fp32, and save there."
                )
            target.copy_(found)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def _read(self, item: ReadItem) -> torch.Tensor:
        key = item.storage_index.fqn
        entry = self.reader.manifest.tensors.get(key)
        if item.type is not LoadItemType.TENSOR or entry is None:
            raise StoreError(f"The checkpoint has no tensor {key!a}.")
        sizes, strides = tuple(item.lengths), torch.empty(entry.shape, device="meta").stride()
        if 0 in sizes:
            return torch.empty(sizes, dtype=torch_dtype(entry.dtype))
        # all elements from the item's first to its last: no others if tensors are cut by rows, as FSDP cuts them
        first = sum(at * stride for at, stride in zip(item.storage_offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        return self.reader.read(key, first, last + 1).as_strided(sizes, strides)
