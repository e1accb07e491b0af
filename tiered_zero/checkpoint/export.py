"""The weights of a tag, without the model, for `write_weights`: bounded memory, whatever the size of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from tiered_zero.checkpoint.portable import BUFFER, MASTER, PARAM, VALUE_KINDS
from tiered_zero.checkpoint.reader import TensorReader
from tiered_zero.checkpoint.tensors import torch_dtype
from tiered_zero.checkpoint.weights import WeightTensor
from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB

_CHUNK_NUMEL: Final = 8 * MIB
"""Elements that are read at a time."""


def list_weights(
    reader: TensorReader, dtype: torch.dtype = torch.float32, *, with_frozen: bool = True
) -> list[WeightTensor]:
    """List the weights of a checkpoint, tied ones under each name. `with_frozen`: also parameters without a master.

    Floating-point parameters are written as `dtype`, trained ones from their fp32 masters, rounded once. Others, and
    buffers, keep their dtype. Raises StoreError: no weights; and as they are read, StoreError for a value that `dtype`
    cannot hold, and CorruptionError.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in reader.manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    found: dict[str, WeightTensor] = {}
    for key, entry in reader.manifest.tensors.items():
        kind, _, name = key.partition("/")
        if kind not in VALUE_KINDS or (kind == PARAM and not with_frozen):
            continue
        own = torch_dtype(entry.dtype)
        target = dtype if kind != BUFFER and own.is_floating_point else own
        read = partial(_read, reader, key, target)
        for each in (name, *aliases.get(name, ())):
            if each in found:
                raise StoreError(
                    f"{each} is there twice, as {key} too: this checkpoint is damaged. Export another one."
                )
            found[each] = WeightTensor(name=each, dtype=target, shape=entry.shape, read=read)
    if not any(key.startswith((f"{MASTER}/", f"{PARAM}/")) for key in reader.manifest.tensors):
        raise StoreError("There are no weights in this checkpoint. Export another one.")
    return list(found.values())


def _read(reader: TensorReader, key: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Read a tensor as `dtype`, row-major, a chunk at a time; whole where it lies in another memory order."""
    entry = reader.manifest.tensors[key]
    step = _CHUNK_NUMEL if entry.order is None else max(1, entry.numel)
    for start in range(0, entry.numel, step):
        values = reader.read(key, start, min(start + step, entry.numel))
        result = values.to(dtype)
        if dtype.itemsize < values.dtype.itemsize and not torch.equal(result.isfinite(), values.isfinite()):
            raise StoreError(
                f"{key} has values that {str(dtype).removeprefix('torch.')} cannot hold: the largest is "
                f"{values[values.isfinite()].abs().max():.4g}. Export it as bf16 or fp32."
            )
        yield result
