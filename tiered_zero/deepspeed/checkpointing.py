"""DeepSpeed's `checkpointing` namespace: functions that are recomputed in backward, over torch.utils.checkpoint.

What a checkpoint saves is offloaded by the engine around it (`tiered_zero.activations`); `checkpoint_in_cpu` offloads
also where no engine does.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tiered_zero.activations.checkpointing import PartitionedInputs, RandomStates, run_checkpointed, seed_generators
from tiered_zero.config.json_file import read_json
from tiered_zero.config.section import Section, shown, switch
from tiered_zero.deepspeed.accelerator import get_accelerator
from tiered_zero.errors import ConfigError
from tiered_zero.hardware.ranks.model_parallel import find_model_parallel_ranks
from tiered_zero.unit.saved_views import moves_saved_tensors, names_saved_views

logger = logging.getLogger("tiered_zero")

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


@final
@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What `configure` was given. `mpu`: DeepSpeed's object for model parallelism; None without one."""

    mpu: Any = None
    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False

    @cached_property
    def inputs(self) -> PartitionedInputs | None:
        """What splits inputs over the group that `mpu` has as this is first asked; None: each rank keeps them whole."""
        ranks = find_model_parallel_ranks(self.mpu) if self.partition_activations else None
        return None if ranks is None else PartitionedInputs(ranks, in_cpu=self.checkpoint_in_cpu)


@final
class _Namespace:
    """The settings of this process, and its named random states."""

    settings: _Settings | None = None
    states = RandomStates()


_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
"""Key of the section `activation_checkpointing` -> argument of `configure` that goes before it."""


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
    """Set how `checkpoint` runs in this process. `deepspeed_config`: a path, an object, or the config of an engine.

    `checkpoint_in_cpu`: inputs of checkpoints rest in host memory, where no engine moves them already. `synchronize`:
    wait for the device around each. `profile`: log the seconds of each. `partition_activations`: inputs of checkpoints,
    which are equal on all ranks of the model-parallel group of `mpu_`, are split over it, and gathered in backward,
    also inside of an engine that moves no activations; without such a group it has no effect, with a notice.
    The group is asked for here: call this again when it is another one. Contiguous buffers have no effect: an
    engine's budget is one piece. Raises ConfigError.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    found = {**_read(deepspeed_config), **{name: value for name, value in given.items() if value is not None}}
    before = _Namespace.settings.mpu if _Namespace.settings is not None else None
    _Namespace.settings = _Settings(mpu=before if mpu_ is None else mpu_, **found)
    _notice_partitions()


def _read(config: Any) -> dict[str, Any]:
    """The arguments that a config stands for."""
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        config = read_json(config)
    if not isinstance(config, (Mapping, Section)):
        raise ConfigError(
            "deepspeed_config: expected a path, an object or the config of an engine; found "
            f"{type(config).__name__}. Leave it out, and pass arguments."
        )
    section = config.get("activation_checkpointing") or {}
    if not isinstance(section, (Mapping, Section)):
        raise ConfigError(
            f"activation_checkpointing: expected an object; found {shown(section)}. Write its keys inside {{}}."
        )
    for key in section if isinstance(section, Mapping) else ():
        if key not in _KEYS and not key.startswith("_"):
            close = difflib.get_close_matches(key, _KEYS, n=1)
            remedy = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(sorted(_KEYS))}."
            raise ConfigError(f"activation_checkpointing.{key}: unknown key. {remedy}")
    found = {}
    for key, argument in _KEYS.items():
        value = section.get(key)
        if argument != "num_checkpoints":
            value = switch(value)
            if value not in (None, "auto", False, True):
                raise ConfigError(f"activation_checkpointing.{key}: expected true or false; found {shown(value)}.")
        if value not in (None, "auto"):
            found[argument] = value
    return found


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _Namespace.settings is not None


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` without its activations, which backward computes again: torch's reentrant checkpoint.

    Tensors among `kwargs` get gradients as those among `args` do. Returns a tensor, or a tuple of several outputs.
    """
    names, num_args = list(kwargs), len(args)

    def run(*values: Any) -> Any:
        return function(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    return _run(run if kwargs else function, (*args, *kwargs.values()), reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same, where the graph of `function` is kept without its tensors: torch's checkpoint that is not reentrant."""
    return _run(function, args, reentrant=False)


def _run(function: Callable[..., Any], args: tuple[Any, ...], *, reentrant: bool) -> Any:
    settings = _Namespace.settings or _Settings()
    if settings.synchronize or settings.profile:
        inner = function

        def function(*values: Any) -> Any:
            is_again = torch._C._current_graph_task_id() != -1
            with _watched(settings, "recomputation" if is_again else "forward"):
                return inner(*values)

    with _saving(settings):
        outputs = run_checkpointed(function, args, _Namespace.states, reentrant=reentrant)
    return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs


def _saving(settings: _Settings) -> AbstractContextManager[Any]:
    """What becomes of the inputs that a checkpoint saves inside of the block."""
    if not torch.is_grad_enabled():
        return nullcontext()
    inputs = settings.inputs
    if inputs is not None and (names_saved_views() or not torch._C._autograd._top_saved_tensors_default_hooks(True)):
        return saved_tensors_hooks(*inputs.hooks())
    return save_on_cpu() if settings.checkpoint_in_cpu and not moves_saved_tensors() else nullcontext()


@contextmanager
def _watched(settings: _Settings, what: str) -> Iterator[None]:
    """Wait for the device around the block, and log its seconds."""
    get_accelerator().synchronize()
    start_s = time.perf_counter()
    yield
    if settings.synchronize:
        get_accelerator().synchronize()
    if settings.profile:
        logger.info("%s of a checkpoint: %.1f ms", what, 1000 * (time.perf_counter() - start_s))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Split the inputs of checkpoints over the model-parallel group from now on, or no more: see `configure`."""
    _Namespace.settings = replace(_Namespace.settings or _Settings(), partition_activations=partition_activation)
    _notice_partitions()


def _notice_partitions() -> None:
    settings = _Namespace.settings
    if settings is not None and settings.partition_activations and settings.inputs is None:
        logger.warning(
            "checkpointing: partition_activations has no effect: it splits what the ranks of a model-parallel group "
            "hold twice, and no mpu with a group of several ranks was given to configure()"
        )


def set_num_layers(nlayers: int) -> None:
    """Accepted without effect: no buffers are cut for a number of checkpoints."""
    _Namespace.settings = replace(_Namespace.settings or _Settings(), num_checkpoints=nlayers)


def reset() -> None:
    """Nothing to do between forwards without a backward: what they saved is freed with their graphs."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator with `seed`, and the tracked one of split modules with another for each
    model-parallel rank of the `mpu` that `configure` was given."""
    mpu = _Namespace.settings.mpu if _Namespace.settings is not None else None
    names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
    rank = next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), 0)
    seed_generators(_Namespace.states, seed, rank)


def get_cuda_rng_tracker() -> RandomStates:
    """Return the named random states of this process, which checkpoints restore for their recomputation."""
    return _Namespace.states
