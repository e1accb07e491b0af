"""Provide DeepSpeed's `zero`: `Init`, `GatheredParameters`, and names that Transformers and TRL read. Most of them do
nothing, because no parameter is sharded while a model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from tiered_zero.deepspeed.accelerator import get_accelerator
from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.errors import ModelError
from tiered_zero.hardware.ranks.collectives import open_default_group
from tiered_zero.hardware.ranks.launcher import get_world_size
from tiered_zero.unit.gathered import gathered

logger = logging.getLogger("tiered_zero")

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

__getattr__ = refuse_other_names("zero")


class Init:
    """A `with` block in which a script builds its model. The model is built in host memory, as without the block;
    `initialize` moves it to its tiers and gives every rank the values of rank 0.

    For a model larger than host memory, use `with torch.device("meta")` instead. The values then come from the model's
    own initialisers or from `tiered_zero.weights`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        *,
        config_dict_or_path: Any = None,
        enabled: bool = True,
        **others: Any,
    ) -> None:
        """Initialize the default process group if there is none. Only `enabled` has an effect."""
        if enabled:
            open_default_group()
            # not on the meta device, where values that a constructor writes into parameters would be lost
            logger.info("zero.Init: the model is built in host memory, and moves to its tiers in initialize()")

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        return


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter | None] | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather weights for a `with` block, using `tiered_zero.gathered`. `modifier_rank`: the rank whose changes every
    rank gets; None: a change raises ModelError. Does nothing before `initialize`, or if `enabled` is false."""
    num_ranks = get_world_size()
    if modifier_rank is not None and modifier_rank not in range(num_ranks):
        raise ModelError(
            f"modifier_rank: expected None or less than {num_ranks}, the number of ranks; found {modifier_rank!r}."
        )
    some = [params] if isinstance(params, nn.Parameter) else params
    # Transformers passes None in place of a bias
    target = some if isinstance(some, nn.Module) else [param for param in some if param is not None]
    with gathered(target, modifier_rank is not None, modifier_rank or 0) if enabled else nullcontext():
        yield


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing. A parameter is fetched when a torch function is called with it, no matter in which module."""


class ZeroParamStatus(IntEnum):
    """DeepSpeed's status of a parameter. Here every parameter is AVAILABLE: it can be used."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return `fn` unchanged: `zero.Init` changes no tensor constructor."""
    return fn
