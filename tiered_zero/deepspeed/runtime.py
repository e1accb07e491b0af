"""Provide DeepSpeed's `initialize` and the classes of `runtime`, with the attributes that other libraries read."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tiered_zero import api
from tiered_zero.data import TrainingLoader
from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.deepspeed.zero import ZeroParamStatus
from tiered_zero.engine.engine import Engine as DeepSpeedEngine
from tiered_zero.errors import ModelError
from tiered_zero.hardware.ranks.launcher import get_world_size
from tiered_zero.rules.lr import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from tiered_zero.update.handle import TieredOptimizer as DeepSpeedOptimizer

__all__ = [
    "VALID_LR_SCHEDULES",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "initialize",
]

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

__getattr__ = refuse_other_names("runtime")


class _ParameterOffload:
    """Replaces DeepSpeed's `optimizer.parameter_offload`. TRL removes and adds the hooks of that object; here it has
    none."""

    class _Module(nn.Module):
        def ds_external_parameters(self) -> tuple[()]:
            return ()

    def __init__(self) -> None:
        self.module = self._Module()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: there are no hooks."""


def initialize(*args: Any, **kwargs: Any) -> tuple[DeepSpeedEngine, DeepSpeedOptimizer, TrainingLoader | None, Any]:
    """Call `tiered_zero.initialize`, and return its results. At stage 3 also set the attributes that TRL and Lightning
    read: `ds_numel` on parameters, `parameter_offload` on the optimizer, `ds_status` on torch.Tensor."""
    _check_accelerate()
    engine, optimizer, loader, scheduler = api.initialize(*args, **kwargs)
    if engine.zero_optimization_stage() == 3:
        # on the class: TRL's losses read it of saved weights, which saved-tensor hooks return as plain tensors
        torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        for param in engine.module.parameters():
            vars(param).update(ds_numel=param.numel())
        if optimizer is not None:
            vars(optimizer).update(parameter_offload=_ParameterOffload())
    return engine, optimizer, loader, scheduler


def _check_accelerate() -> None:
    """Raise ModelError if Accelerate has another number of ranks, because it would split the data wrongly."""
    # without a GPU and without a named backend, Accelerate finds one rank in each process
    state = sys.modules.get("accelerate.state")
    known = state.PartialState._shared_state.get("num_processes") if state is not None else None
    if known is not None and known != get_world_size():
        raise ModelError(
            f"Accelerate was expected to split the data over {get_world_size()} ranks; it knows of {known}. Name the "
            'backend: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]), or use_cpu=True in '
            "TrainingArguments."
        )
