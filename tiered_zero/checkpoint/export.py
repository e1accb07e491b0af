"""The weights of a tag as safetensors files, without the model: bounded memory, whatever the size of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader

from tiered_zero.checkpoint.boxes import Box, boxes
from tiered_zero.checkpoint.portable import BUFFER, MASTER, PARAM, VALUE_KINDS
from tiered_zero.checkpoint.weights import MAX_SHARD_NBYTES, WeightTensor, write_weights
from tiered_zero.errors import InternalError, StoreError
from tiered_zero.sizes import MIB

_CHUNK_NUMEL: Final = 8 * MIB
"""Elements that are read at a time."""


def export_weights(
    reader: StorageReader,
    out: Path,
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
) -> list[Path]:
    """Write the weights that `reader` has to the directory `out`; see `write_weights`.

    Floating-point parameters are written as `dtype`, those that are trained from their fp32 masters, rounded once.
    Other parameters, and buffers, keep their dtype. Raises StoreError: no weights, a value that `dtype` cannot hold;
    CorruptionError for bytes that are not those written.
    """
    return write_weights(out, list_weights(reader, dtype), max_shard_nbytes=max_shard_nbytes)


def list_weights(reader: StorageReader, dtype: torch.dtype) -> list[WeightTensor]:
    """List what `export_weights` writes."""
    metadata = reader.read_metadata()
    found: dict[str, WeightTensor] = {}
    for key, stored in metadata.state_dict_metadata.items():
        kind, _, name = key.partition("/")
        if kind not in VALUE_KINDS or not isinstance(stored, TensorStorageMetadata):
            continue
        if name in found:
            raise StoreError(f"{name} is there twice, as {key} too: this checkpoint is damaged. Export another one.")
        own = stored.properties.dtype
        target = dtype if kind != BUFFER and own.is_floating_point else own
        found[name] = WeightTensor(
            name=name, dtype=target, shape=tuple(stored.size), read=_Read(reader, key, stored, target)
        )
    if not any(key.startswith((f"{MASTER}/", f"{PARAM}/")) for key in metadata.state_dict_metadata):
        raise StoreError("There are no weights in this checkpoint. Export another one.")
    return list(found.values())


@final
class _Read:
    """Reads one tensor, a chunk at a time, as `dtype`."""

    def __init__(self, reader: StorageReader, key: str, stored: TensorStorageMetadata, dtype: torch.dtype) -> None:
        self._reader, self._key, self._stored, self._dtype = reader, key, stored, dtype

    def __call__(self) -> Iterator[torch.Tensor]:
        numel = self._stored.size.numel()
        for start in range(0, numel, _CHUNK_NUMEL):
            yield self._converted(self._chunk(start, min(start + _CHUNK_NUMEL, numel)))

    def _chunk(self, start: int, stop: int) -> torch.Tensor:
        """Read the row-major elements [start, stop)."""
        flat = torch.empty(stop - start, dtype=self._stored.properties.dtype)
        targets: dict[tuple[int, ...], torch.Tensor] = {}
        at = 0
        wanted = boxes(self._stored.size, start, stop)
        for box in wanted:
            targets[box.offsets] = flat[at : at + box.numel].view(box.sizes)
            at += box.numel
        items = create_read_items_for_chunk_list(self._key, self._stored, [_metadata(box) for box in wanted])
        if sum(torch.Size(item.lengths).numel() for item in items) != stop - start:
            raise InternalError(f"{self._key}: the parts of elements {start} to {stop} were expected to cover them.")
        self._reader.read_data(LoadPlan(items), _Targets(targets)).wait()
        return flat

    def _converted(self, values: torch.Tensor) -> torch.Tensor:
        result = values.to(self._dtype)
        if self._dtype.itemsize < values.dtype.itemsize and not torch.equal(result.isfinite(), values.isfinite()):
            raise StoreError(
                f"{self._key} has values that {str(self._dtype).removeprefix('torch.')} cannot hold: the largest is "
                f"{values[values.isfinite()].abs().max():.4g}. Export it as bf16 or fp32."
            )
        return result


def _metadata(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


@final
class _Targets(LoadPlanner):
    """Gives the reader the memory of each box, by the box's offsets."""

    def __init__(self, targets: Mapping[tuple[int, ...], torch.Tensor]) -> None:
        self._targets = targets

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the plan is made elsewhere."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise InternalError(f"{read_item.dest_index.fqn} was expected to be a tensor.")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.offset is not None, "items of tensors have offsets"
        target = self._targets[tuple(read_item.dest_index.offset)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the memory is the chunk's own."""
