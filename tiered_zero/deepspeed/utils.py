"""Provide DeepSpeed's `utils`: the full values of a parameter, the weights of a checkpoint as fp32, and the logger.

It also has the names that Accelerate imports from `checkpoint.utils` and `launcher.runner`. Every byte read is checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from logging import INFO, getLogger
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from tiered_zero.checkpoint.load import TensorReader
from tiered_zero.checkpoint.tag import find_checkpoint, open_reader
from tiered_zero.checkpoint.weights import WeightTensor, list_weights, write_weights
from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.engine.full_values import get_grad, get_master, get_state, set_grad, set_master, set_state
from tiered_zero.errors import BudgetError, ConfigError
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.launcher import get_rank
from tiered_zero.sizes import format_nbytes, parse_nbytes

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "RepeatingLoader",
    "clone_tensors_for_torch_save",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
]

__getattr__ = refuse_other_names("utils")

logger = getLogger("tiered_zero")

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file in which Accelerate stores environment variables for other hosts, before it starts torchrun."""

StateDict = dict[str, torch.Tensor]
_Item = TypeVar("_Item")
_ONE_FILE = 1 << 62


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log `message` if `ranks` is None, or contains this process's rank or -1 (which means all ranks)."""
    if ranks is None or get_rank() in ranks or -1 in ranks:
        logger.log(level, "%s", message)


def clone_tensors_for_torch_save(item: _Item, device: object = None) -> _Item:
    """Return `item` as it is: no clone is needed, because `state_dict()` already gives copies in host memory."""
    return item


class RepeatingLoader:
    """Yields the batches of `loader` without end. When `loader` ends, its batches are read again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Return the modules of `model` that have one of the given classes or class names; change nothing. Raises
    ConfigError if there are none and `raise_if_not_found` is true."""
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    names = {kind for kind in leaf_module_classes if isinstance(kind, str)}

    def is_meant(module: nn.Module) -> bool:
        own = type(module)
        return isinstance(module, kinds) or own.__name__ in names or f"{own.__module__}.{own.__qualname__}" in names

    found = [module for module in model.modules() if is_meant(module)]
    if not found and raise_if_not_found:
        asked = ", ".join(getattr(kind, "__name__", str(kind)) for kind in leaf_module_classes)
        raise ConfigError(
            f"Expected modules of {asked or 'some class'} in {type(model).__name__}; found none. Correct the names, or "
            "pass raise_if_not_found=False."
        )
    return found


safe_get_full_fp32_param, safe_set_full_fp32_param = get_master, set_master
safe_get_full_grad, safe_set_full_grad = get_grad, set_grad


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return an fp32 copy on the CPU of the state `optim_state_key`, such as "exp_avg"; None before the first step."""
    return get_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the state `optim_state_key`, such as "exp_avg", to `value`. Raises ModelError before the first step."""
    set_state(param, optim_state_key, value)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> StateDict:
    """Read the weights of `checkpoint_dir/tag` into host memory as fp32; a tied weight has each of its names. Without
    `tag`, read the checkpoint that `latest` names, else the newest whole one. `lazy_mode`: no effect. Raises
    StoreError, CorruptionError, and BudgetError if the weights do not fit into free host memory."""
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
    model may be open. Logs a warning with the number of names that only the model or only the checkpoint has. Raises
    the errors of `get_fp32_state_dict_from_zero_checkpoint`."""
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
    """Write the weights of `checkpoint_dir/tag` to `output_dir` as safetensors, in bounded memory. `max_shard_size`:
    the most bytes of a file, or text such as "5GB"; None: one file. `safe_serialization`: False only logs a warning.
    Raises StoreError, CorruptionError, ConfigError."""
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
    """Read the tensor of `weight`, add it to `read`, and return it. So a tied weight with several names is read
    once."""
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    flat, start = whole.view(-1), 0
    for part in weight.read():
        flat[start : start + part.numel()] = part.view(-1)
        start += part.numel()
    read[id(weight.read)] = whole
    return whole
