"""Provide DeepSpeed's `utils.zero_to_fp32`: read a checkpoint's weights as fp32, without the engine that wrote it.

`tiered-zero checkpoint export` is the command for it. Every byte that is read is checked.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch import nn

from tiered_zero.checkpoint.load import TensorReader
from tiered_zero.checkpoint.tag import find_checkpoint, open_reader
from tiered_zero.checkpoint.weights import WeightTensor, list_weights, write_weights
from tiered_zero.errors import BudgetError, ConfigError
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.sizes import format_nbytes, parse_nbytes

logger = logging.getLogger("tiered_zero")

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

StateDict = dict[str, torch.Tensor]
_ONE_FILE = 1 << 62


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> StateDict:
    """Read the weights of `checkpoint_dir/tag` to host memory: parameters as fp32, tied ones under each of their names.

    `tag`: the checkpoint; None: the one that `latest` names, else the newest whole one. `exclude_frozen_parameters`:
    leave out parameters that were not trained. `lazy_mode` has no effect. Raises StoreError, CorruptionError, and
    BudgetError if the weights do not fit into free host memory.
    """
    with _open(checkpoint_dir, tag) as reader:
        weights = list_weights(reader, with_frozen=not exclude_frozen_parameters)
        needed = sum({id(weight.read): weight.nbytes for weight in weights}.values())
        if needed > (free := available_host_nbytes()):
            raise BudgetError(
                f"The weights were expected to fit into free host memory; they take {format_nbytes(needed)} and "
                f"{format_nbytes(free)} are free. `tiered-zero checkpoint export` writes files in bounded memory."
            )
        read: dict[int, torch.Tensor] = {}
        return {
            weight.name: read[id(weight.read)] if id(weight.read) in read else _read(weight, read) for weight in weights
        }


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the weights of `checkpoint_dir/tag` into `model`, move the model to the CPU, and return it. No engine of the
    model may be open. A warning counts the names that only the model or only the checkpoint has. Raises what
    `get_fp32_state_dict_from_zero_checkpoint` raises."""
    found = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    missing, unexpected = model.load_state_dict(found, strict=False)
    for names, where in ((missing, "checkpoint has no values for"), (unexpected, "model has no place for")):
        if names:
            logger.warning("the %s %d names, such as %s", where, len(names), names[0])
    return model.cpu()


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of `checkpoint_dir/tag` to `output_dir` as safetensors, also without `safe_serialization`, in
    bounded memory. `max_shard_size`: the most bytes of a file, or text such as "5GB"; None: one file. Raises
    StoreError, CorruptionError, ConfigError."""
    if not safe_serialization:
        logger.warning("convert_zero_checkpoint_to_fp32_state_dict writes model.safetensors, and no pytorch_model.bin")
    try:
        most = _ONE_FILE if max_shard_size is None else parse_nbytes(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: {error}.") from None
    with _open(checkpoint_dir, tag) as reader:
        weights = list_weights(reader, with_frozen=not exclude_frozen_parameters)
        write_weights(Path(output_dir), weights, max_shard_nbytes=most, replaces=False)


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> TensorReader:
    found = find_checkpoint(checkpoint_dir, tag)
    for line in found.lines:
        logger.warning("%s", line)
    return open_reader(found)


def _read(weight: WeightTensor, read: dict[int, torch.Tensor]) -> torch.Tensor:
    """Read the tensor of `weight`, add it to `read`, in which its other names find it, and return it."""
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    flat, start = whole.view(-1), 0
    for part in weight.read():
        flat[start : start + part.numel()] = part.view(-1)
        start += part.numel()
    read[id(weight.read)] = whole
    return whole
