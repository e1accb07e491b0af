"""`initialize`, and the class of the engine that it returns."""

from __future__ import annotations

from typing import Any

from torch import nn

from tiered_zero import api
from tiered_zero.data import TrainingLoader
from tiered_zero.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tiered_zero.engine.engine import Engine as DeepSpeedEngine
from tiered_zero.update.handle import TieredOptimizer

__all__ = ["DeepSpeedEngine", "initialize"]


class _ParameterOffload:
    """`optimizer.parameter_offload` of DeepSpeed, whose hooks TRL takes off a model that generates, and puts on again.
    Parameters are fetched here by the functions that are called with them, so there are none."""

    class _Module(nn.Module):
        def ds_external_parameters(self) -> tuple[()]:
            return ()

    def __init__(self) -> None:
        self.module = self._Module()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing to do."""


def initialize(*args: Any, **kwargs: Any) -> tuple[DeepSpeedEngine, TieredOptimizer, TrainingLoader | None, Any]:
    """Do `tiered_zero.initialize`. At stage 3 parameters and the optimizer get attributes of DeepSpeed that TRL and
    Lightning read: `ds_numel` (elements), `ds_status` (AVAILABLE: a function fetches what it is called with) and
    `parameter_offload`."""
    engine, optimizer, loader, scheduler = api.initialize(*args, **kwargs)
    if engine.zero_optimization_stage() == 3:
        for param in engine.module.parameters():
            vars(param).update(ds_numel=param.numel(), ds_status=ZeroParamStatus.AVAILABLE)
        if optimizer is not None:
            vars(optimizer).update(parameter_offload=_ParameterOffload())
    return engine, optimizer, loader, scheduler
