"""Provide what Transformers and TRL read from DeepSpeed's `partition_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from tiered_zero.deepspeed.accelerator import get_accelerator
from tiered_zero.deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]


class ZeroParamStatus(IntEnum):
    """Whether a parameter can be used: here each is AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return `fn`: `zero.Init` changes no constructor of tensors."""
    return fn
