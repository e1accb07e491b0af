"""Tags of checkpoints, written and read without an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.inspection.insides import (
    Commit,
    Part,
    RankPart,
    Share,
    Source,
    StoreLocation,
    TagInfo,
    TagManifest,
    TagWriter,
    TensorEntry,
    TensorReader,
    WrittenBy,
    data_files,
    describe,
    find_checkpoint,
    list_tags,
    look_at,
    open_commit,
    open_reader,
)
from tiered_zero.io.engine import IOEngine
from tiered_zero.io.select import Selection, select_engine, select_reader
from tiered_zero.sizes import PAGE_NBYTES, align_up

Tensors = Mapping[str, torch.Tensor]


@contextmanager
def moved_by(engine: IOEngine | None) -> Iterator[None]:
    """The data of tags and commits is written and read by `engine` (None: by the engine that is chosen)."""
    selection = None if engine is None else Selection(engine=engine, reasons=())
    with (
        mock.patch.object(data_files, "select_engine", lambda *own, **more: selection or select_engine(*own, **more)),
        mock.patch.object(data_files, "select_reader", lambda *own, **more: engine or select_reader(*own, **more)),
    ):
        yield


def written_by(**changes: Any) -> WrittenBy:
    fields = {"tiered_zero": "0", "torch": "2", "kernel": "none", "rule": "adam", "state_format": "fp32"}
    return WrittenBy(**{**fields, "world_size": 1, "num_threads": 1, "created_s": 0.0, **changes})  # type: ignore[arg-type]


def fields(step: int, **changes: Any) -> dict[str, Any]:
    """What a tag says besides its tensors."""
    return {"step": step, "written_by": written_by(created_s=float(step)), **changes}


def commit_metadata(step: int, save_id: str, swap: StoreLocation) -> dict[str, Any]:
    """What the store at `swap` says of an in-place commit without tensors, of one rank."""
    checkpoint = TagManifest(**fields(step), tag="commit", save_id=save_id, swap=swap)
    ranks = [RankPart(stores=[swap], layout="", initialized=[])]
    return Commit(commit_id=save_id, checkpoint=checkpoint, ranks=ranks).model_dump(mode="json")


def in_pages(data: bytes) -> memoryview:
    """Whole pages of memory that begin with `data`."""
    memory = memoryview(mmap.mmap(-1, align_up(len(data), PAGE_NBYTES)))
    memory[: len(data)] = data
    return memory


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().data) if tensor.numel() else b""


def write_padding(writer: TagWriter, name: str, nbytes: int) -> None:
    """Write a record that no tensor needs."""
    writer.writer.append(name, in_pages(os.urandom(nbytes)))


def write_share(writer: TagWriter, tensors: Tensors, orders: Mapping[str, Sequence[int]] | None = None) -> Share:
    """Write each tensor to a record of its own; `orders`: their dimensions in memory."""
    entries: dict[str, TensorEntry] = {}
    for key, tensor in tensors.items():
        order = (orders or {}).get(key)
        entry = describe(tensor.dtype, tensor.shape, None if order is None else tuple(order))
        part: tuple[Part, ...] = ()
        if tensor.numel():
            writer.writer.append(key, in_pages(raw_bytes(tensor if order is None else tensor.permute(*order)))).wait()
            part = (Part(0, tensor.numel(), (Source(0, key, 0),)),)
        entries[key] = TensorEntry(dtype=entry.dtype, shape=entry.shape, order=entry.order, parts=part)
    stores = [writer.writer.finish()]
    return Share(tensors=entries, scalars={}, driver={}, stores=stores)


def save_tag(
    save_dir: Path, tag: str, tensors: Tensors, step: int, engine: IOEngine | None = None, **changes: Any
) -> None:
    needed_nbytes = sum(align_up(tensor.nbytes, PAGE_NBYTES) for tensor in tensors.values())
    with (
        moved_by(engine),
        TagWriter.begin(save_dir, tag, needed_nbytes=needed_nbytes) as writer,
        writer.writing(),
    ):
        writer.publish(fields(step, **changes), [write_share(writer, tensors)])


def data_file(tag_dir: Path, rank: int = 0) -> Path:
    """The data file that a rank has written."""
    (path,) = tag_dir.glob(f"data-{rank:05d}-*.bin")
    return path


def unfinished(save_dir: Path) -> list[str]:
    """The files of saves that are not published, or were replaced, by their paths below the save directory."""
    found = [*save_dir.glob("*.next"), *save_dir.glob("*/*.next")]
    for path in save_dir.glob("*/data-*.bin"):
        manifest = path.with_name("manifest.json")
        if not manifest.exists() or path.stem.rpartition("-")[2] not in manifest.read_text():
            found.append(path)
    return sorted(str(path.relative_to(save_dir)) for path in found)


def newest_complete(save_dir: Path) -> TagInfo | None:
    return next((info for info in reversed(list_tags(save_dir)) if info.complete), None)


def tag_to_load(save_dir: Path, tag: str | None = None) -> TagInfo:
    """The tag that a load takes. Raises StoreError."""
    return look_at(find_checkpoint(save_dir, tag).path)[0]


def read_manifest(tag_dir: Path) -> TagManifest:
    """The manifest of a tag. Raises StoreError."""
    manifest = find_checkpoint(tag_dir.parent, tag_dir.name).manifest
    assert manifest is not None
    return manifest


def open_tag(tag_dir: Path) -> TensorReader:
    """Raises StoreError."""
    return open_reader(find_checkpoint(tag_dir.parent, tag_dir.name))


def load_tag(tag_dir: Path, engine: IOEngine | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a tag. Raises StoreError."""
    with moved_by(engine), open_tag(tag_dir) as reader:
        return read_all(reader)


def load_commit(swap_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of an in-place commit. Raises StoreError."""
    with open_commit(swap_dir) as reader:
        return read_all(reader)


def read_all(reader: TensorReader) -> dict[str, torch.Tensor]:
    return {key: reader.read(key).view(entry.shape) for key, entry in reader.manifest.tensors.items()}


def equal_bits(one: Tensors, other: Tensors) -> bool:
    """The same keys, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype
        and one[key].shape == other[key].shape
        and raw_bytes(one[key]) == raw_bytes(other[key])
        for key in one
    )
