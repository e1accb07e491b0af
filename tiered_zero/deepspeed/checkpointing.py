"""Provide DeepSpeed's `checkpointing`: run functions with torch.utils.checkpoint, which runs them again in backward.

The functions' inputs are saved until backward. An engine can offload them (`tiered_zero.activations`). Without an
engine, `checkpoint_in_cpu` moves them to host memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint as torch_checkpoint

from tiered_zero.config.load import load, read_json
from tiered_zero.config.schema import ActivationCheckpointingSection, Config
from tiered_zero.config.section import switch
from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.errors import ConfigError
from tiered_zero.unit.saved_views import moves_saved_tensors

logger = logging.getLogger("tiered_zero")

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


__getattr__ = refuse_other_names("checkpointing")


class _Settings:
    """The settings of this process, from `configure`."""

    is_configured = False
    checkpoint_in_cpu = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` runs in this process. Raises ConfigError.

    `deepspeed_config`: a dict, the path of a JSON file, or the config of an engine. `checkpoint_in_cpu`: whether to
    keep saved inputs in host memory if no engine moves them; None: as the config says. `partition_activations`: True
    only logs a warning. The other arguments have no effect.
    """
    section, is_partitioned = _read(deepspeed_config)
    partition_activations_in_checkpoint(is_partitioned if partition_activations is None else partition_activations)
    _Settings.is_configured = True
    _Settings.checkpoint_in_cpu = section.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu


def _read(config: Any) -> tuple[ActivationCheckpointingSection, bool]:
    """Return a config's section activation_checkpointing, and whether it sets partition_activations to true."""
    if config is None:
        return ActivationCheckpointingSection(), False
    if isinstance(config, Config):
        return config.activation_checkpointing, False
    if isinstance(config, (str, os.PathLike)):
        config = read_json(config)
    if not isinstance(config, Mapping):
        raise ConfigError(
            "deepspeed_config: expected a path, an object or the config of an engine; found "
            f"{type(config).__name__}. Leave it out, and pass arguments."
        )
    section = config.get("activation_checkpointing")
    read = load({"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": section}).activation_checkpointing
    return read, switch((section or {}).get("partition_activations")) is True


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _Settings.is_configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` without keeping its activations: backward runs it again. Uses torch's reentrant checkpoint.
    Tensors in `kwargs` get gradients too. Returns a tensor, or a tuple of several outputs."""
    names, num_args = list(kwargs), len(args)

    def run(*values: Any) -> Any:
        return function(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    return _run(run if kwargs else function, (*args, *kwargs.values()), reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` like `checkpoint`, but with torch's non-reentrant checkpoint."""
    return _run(function, args, reentrant=False)


def _run(function: Callable[..., Any], args: tuple[Any, ...], *, reentrant: bool) -> Any:
    def run(*values: Any) -> Any:
        outputs = function(*values)
        return tuple(outputs) if isinstance(outputs, list) else outputs

    with _saving():
        outputs = torch_checkpoint.checkpoint(run, *args, use_reentrant=reentrant)
    return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs


def _saving() -> AbstractContextManager[Any]:
    """Return a context manager. It saves inputs in host memory if `checkpoint_in_cpu` is set and no engine moves
    them."""
    in_cpu = _Settings.checkpoint_in_cpu and torch.is_grad_enabled() and not moves_saved_tensors()
    return save_on_cpu() if in_cpu else nullcontext()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Log a warning if `partition_activation` is true, because checkpoints' inputs are not split over ranks."""
    if partition_activation:
        logger.warning(
            "checkpointing: partition_activations has no effect: every rank keeps the inputs of its checkpoints whole. "
            "Set checkpoint_in_cpu to keep them in host memory."
        )


def set_num_layers(nlayers: int) -> None:
    """Do nothing, because no buffer depends on the number of layers."""


def reset() -> None:
    """Do nothing. The inputs that a checkpoint saves are freed with the autograd graph, even if no backward runs."""
