"""The weights of a tag as safetensors files, without the model: bounded memory, whatever the size of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from tiered_zero.checkpoint.planner import Group, Target, read_groups
from tiered_zero.checkpoint.portable import BUFFER, MASTER, PARAM, VALUE_KINDS
from tiered_zero.checkpoint.weights import MAX_SHARD_NBYTES, WeightTensor, write_weights
from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB

_CHUNK_NUMEL: Final = 8 * MIB
"""Elements that are read at a time."""


def export_weights(
    reader: StorageReader,
    out: Path,
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    replaces: bool = False,
) -> list[Path]:
    """Write the weights that `reader` has to the directory `out`; see `write_weights`.

    Floating-point parameters are written as `dtype`, those that are trained from their fp32 masters, rounded once.
    Other parameters, and buffers, keep their dtype. `replaces`: also the weights of another model in `out`. Raises
    StoreError: no weights, a value that `dtype` cannot hold, weights of another model; CorruptionError for bytes that
    are not those written.
    """
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
            name=name, dtype=target, shape=tuple(stored.size), read=partial(_read, reader, metadata, key, target)
        )
    if not any(key.startswith((f"{MASTER}/", f"{PARAM}/")) for key in metadata.state_dict_metadata):
        raise StoreError("There are no weights in this checkpoint. Export another one.")
    return write_weights(out, list(found.values()), max_shard_nbytes=max_shard_nbytes, replaces=replaces)


def _read(reader: StorageReader, metadata: Metadata, key: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Read a tensor as `dtype`, row-major, a chunk at a time."""
    stored = metadata.state_dict_metadata[key]
    assert isinstance(stored, TensorStorageMetadata), "a tensor's key"
    shape = tuple(stored.size)
    for start in range(0, prod(shape), _CHUNK_NUMEL):
        stop = min(start + _CHUNK_NUMEL, prod(shape))
        values = torch.empty(stop - start, dtype=stored.properties.dtype)
        target = Target(key=key, start=start, stop=stop, shape=shape, order=None, values=values)
        read_groups(reader, metadata, [Group(targets=[target])])
        result = values.to(dtype)
        if dtype.itemsize < values.dtype.itemsize and not torch.equal(result.isfinite(), values.isfinite()):
            raise StoreError(
                f"{key} has values that {str(dtype).removeprefix('torch.')} cannot hold: the largest is "
                f"{values[values.isfinite()].abs().max():.4g}. Export it as bf16 or fp32."
            )
        yield result
