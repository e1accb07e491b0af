"""Tags of checkpoints, written and read without an engine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tiered_zero.checkpoint.directory import TagInfo, list_tags
from tiered_zero.checkpoint.storage import FileReader, FileWriter, our_errors
from tiered_zero.checkpoint.store_reader import StoreReader
from tiered_zero.checkpoint.tag_manifest import TagManifest, WrittenBy
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.io.engine import IOEngine

Tensors = Mapping[str, torch.Tensor]


def written_by(**changes: Any) -> WrittenBy:
    fields = {"tiered_zero": "0", "torch": "2", "kernel": "none", "rule": "adam", "state_format": "fp32"}
    return WrittenBy(**{**fields, "world_size": 1, "created_s": 0.0, **changes})  # type: ignore[arg-type]


def fields(step: int, **changes: Any) -> dict[str, Any]:
    """What a tag says besides its tensors."""
    return {"step": step, "written_by": written_by(created_s=float(step)), **changes}


def plain_save(tensors: Mapping[str, Any], writer: FileWriter, planner: dcp.SavePlanner | None = None) -> None:
    """torch.distributed.checkpoint.save, in one process."""
    with warnings.catch_warnings(), our_errors():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save({**tensors}, storage_writer=writer, planner=planner, no_dist=True)


def plain_load(into: dict[str, Any], reader: FileReader, planner: dcp.LoadPlanner | None = None) -> None:
    """torch.distributed.checkpoint.load, in one process."""
    with warnings.catch_warnings(), our_errors():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.load(into, storage_reader=reader, planner=planner, no_dist=True)


def save_tag(
    save_dir: Path, tag: str, tensors: Tensors, step: int, engine: IOEngine | None = None, **changes: Any
) -> TagManifest:
    with TagWriter.begin(save_dir, tag, engine=engine, needed_nbytes=sum(t.nbytes for t in tensors.values())) as writer:
        for key, tensor in tensors.items():
            writer.writer.write(key, tensor)
        return writer.publish(fields(step, **changes))


def newest_complete(save_dir: Path) -> TagInfo | None:
    return next((info for info in reversed(list_tags(save_dir)) if info.complete), None)


def load_tag(tag_dir: Path, engine: IOEngine | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a tag. Raises StoreError."""
    with FileReader(tag_dir, engine) as reader:
        return _read_all(reader)


def load_commit(swap_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of an in-place commit. Raises StoreError."""
    with StoreReader(swap_dir) as reader:
        return _read_all(reader)


def _read_all(reader: FileReader | StoreReader) -> dict[str, torch.Tensor]:
    entries = reader.manifest.tensors.items()
    into = {key: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in entries}
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(into, reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner)
    return into


def equal_bits(one: Tensors, other: Tensors) -> bool:
    """The same keys, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype
        and one[key].shape == other[key].shape
        and _bits(one[key]).equal(_bits(other[key]))
        for key in one
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
