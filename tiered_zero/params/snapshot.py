"""Snapshot of the user's model, restored if initialize() fails.

[Note: ModelSnapshot]
Parameters with values are kept by reference until the engine is built, so that nothing need be read back from a tier
that may just have failed. The plan counts on none of that memory: it was checked against what else is free. On the
device they are released for their unit's flat, unless that holds them rounded and the device is the CPU. Of parameters
on meta nothing is kept: a model larger than memory is materialized unit by unit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from tiered_zero.params.param_handlers import release_param

logger = logging.getLogger("tiered_zero")


@dataclass(frozen=True, kw_only=True)
class _Original:
    """`data`: a view of the memory that the parameter had; None on meta, and of one that was released."""

    own_class: type[nn.Parameter]
    dtype: torch.dtype
    is_meta: bool
    data: torch.Tensor | None


@final
class ModelSnapshot:
    """The parameters and buffers of a model as the user handed it in. Driver thread."""

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._params = {
                param: _Original(
                    own_class=type(param),
                    dtype=param.dtype,
                    is_meta=param.is_meta,
                    data=None if param.is_meta else param.data,
                )
                for param in params
            }
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def release(self, params: Iterable[nn.Parameter]) -> None:
        """Drop the former memory of `params` where it is on the device: their values are in a flat there."""
        for param in params:
            original = self._params[param]
            if original.data is None or original.data.device != param.device:
                continue
            if param.dtype == original.dtype or param.device.type != "cpu":
                self._params[param] = replace(original, data=None)

    def discard(self) -> None:
        """Drop all former memory: the engine is built."""
        self._params.clear()
        self._buffers.clear()

    def restore(self) -> None:
        """Make every parameter and buffer what it was, and plain. Called after the pager is closed; does nothing after
        `discard`."""
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        rounded: set[torch.dtype] = set()
        for param, original in self._params.items():
            release_param(param, original.own_class)
            with torch._C.DisableTorchFunctionSubclass():
                if original.data is not None:
                    param.data = original.data
                elif original.is_meta:
                    _return_to_meta(param, original.dtype)
                elif param.dtype != original.dtype:
                    rounded.add(param.dtype)
                    param.data = param.data.to(original.dtype)
        self.discard()
        if rounded:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in rounded))
            logger.error(
                "the start broke off: values of the model that were on the device are rounded to %s now", found
            )


def _return_to_meta(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Put the parameter on meta. `torch.utils.swap_tensors` refuses where a view is held, as by the frames of an
    initialiser that raised; such a view stays as it is here."""
    if not param.is_meta:
        twin = nn.Parameter(
            torch.empty_strided(param.shape, param.stride(), dtype=dtype, device="meta"), param.requires_grad
        )
        torch._C._swap_tensor_impl(param, twin)
