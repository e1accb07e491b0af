"""tiered_zero: train PyTorch models that are larger than GPU memory, over device, host and NVMe, bit for bit.

The public names are imported when they are first asked for, so that `tiered_zero.record` needs no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tiered_zero.version import __version__ as __version__

if TYPE_CHECKING:
    from tiered_zero.api import add_config_arguments, initialize
    from tiered_zero.config.load import load as load_config
    from tiered_zero.config.schema import Config
    from tiered_zero.data import TrainingLoader
    from tiered_zero.deepspeed import accelerator, checkpointing, comm, utils, zero
    from tiered_zero.deepspeed.accelerator import get_accelerator
    from tiered_zero.deepspeed.comm import init_distributed
    from tiered_zero.engine.engine import Engine
    from tiered_zero.engine.engine import Engine as DeepSpeedEngine
    from tiered_zero.errors import (
        BudgetError,
        ConfigError,
        CorruptionError,
        EngineFailedError,
        MissingModuleError,
        MissingNameError,
        ModelError,
        NonFiniteError,
        ParameterOffloadedError,
        PlanError,
        RankError,
        StoreError,
        TieredZeroError,
        TransferError,
    )
    from tiered_zero.errors import ConfigError as DeepSpeedConfigError
    from tiered_zero.io.engine import dump_on
    from tiered_zero.params.gather import gathered
    from tiered_zero.plan.planner import Plan
    from tiered_zero.stopping import stop_on_signals

_HOMES = {
    "initialize": "api",
    "load_config": "config.load:load",
    "Config": "config.schema",
    "Engine": "engine.engine",
    "TrainingLoader": "data",
    "DeepSpeedEngine": "engine.engine:Engine",
    "DeepSpeedConfigError": "errors:ConfigError",
    "init_distributed": "deepspeed.comm",
    "get_accelerator": "deepspeed.accelerator",
    "add_config_arguments": "api",
    "gathered": "params.gather",
    "Plan": "plan.planner",
    "stop_on_signals": "stopping",
    "dump_on": "io.engine",
}
_MODULES = ("accelerator", "checkpointing", "comm", "utils", "zero")
_EVALUATE = "give initialize() no optimizer, and call the engine: it evaluates"
_TORCH_OPTIMIZER = "name the optimizer in the config, or pass any of torch's to initialize()"
_ONE_RANK = "this version does not split a model's modules over ranks; ZeRO stage 3 shards their parameters"
_NUMBERS = "engine.step_report, engine.memory_report() and tiered_zero.report have the numbers"
_MISSING = {
    "init_inference": _EVALUATE,
    "InferenceEngine": _EVALUATE,
    "default_inference_config": _EVALUATE,
    "ops": _TORCH_OPTIMIZER,
    "PipelineModule": _ONE_RANK,
    "PipelineEngine": _ONE_RANK,
    "pipe": _ONE_RANK,
    "moe": _ONE_RANK,
    "tp_model_init": _ONE_RANK,
    "OnDevice": "build the model under torch.device('meta')",
    "runtime": "what scripts take from it is at the top: initialize, zero, comm, utils, ConfigError; schedules have "
    "names in the config, and engine.memory_report() has the bytes",
    "inference": _EVALUATE,
    "module_inject": _EVALUATE,
    "model_implementations": _EVALUATE,
    "sequence": _ONE_RANK,
    "profiling": _NUMBERS,
    "monitor": _NUMBERS,
    "launcher": "start the script with python, or with torchrun --nproc-per-node N",
    "elasticity": "write the batch size into the config; a checkpoint loads with any number of ranks",
    "autotuning": "tiered-zero plan shows the bytes of a config, tiered-zero bench io the rates of a disk",
    "compression": "compress the model before or after training",
    "linear": "take LoRA from peft: frozen parameters are paged too",
}
"""Names and modules of DeepSpeed that do not exist here -> what to do."""

__all__ = [  # noqa: RUF022 (the order of the API page)
    "initialize",
    "Engine",
    "gathered",
    "TrainingLoader",
    "stop_on_signals",
    "dump_on",
    "load_config",
    "Config",
    "Plan",
    "init_distributed",
    "get_accelerator",
    "add_config_arguments",
    "DeepSpeedEngine",
    "DeepSpeedConfigError",
    "TieredZeroError",
    "BudgetError",
    "ConfigError",
    "CorruptionError",
    "EngineFailedError",
    "MissingModuleError",
    "MissingNameError",
    "ModelError",
    "NonFiniteError",
    "ParameterOffloadedError",
    "PlanError",
    "RankError",
    "StoreError",
    "TransferError",
    "accelerator",
    "checkpointing",
    "comm",
    "utils",
    "zero",
]


class _DeepSpeedModules(Loader):
    """First on sys.meta_path: `from deepspeed.zero import ...` and `from deepspeed.ops.adam import ...`, rewritten, ask
    it. Each module is loaded once, under its own name."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Find a module of DeepSpeed in its folder. Raises MissingModuleError for one that does not exist here."""
        package, _, module = name.partition(".")
        if package != __name__:
            return None
        if module.partition(".")[0] in _MODULES:
            return ModuleSpec(name, cls())
        if module in _MISSING:
            from tiered_zero.errors import MissingModuleError

            raise MissingModuleError(f"deepspeed.{module} does not exist here: {_MISSING[module]}.")
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.name.replace(__name__, f"{__name__}.deepspeed", 1))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run under its own name."""


sys.meta_path.insert(0, _DeepSpeedModules)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.deepspeed.{name}")
    if name in _MISSING:
        from tiered_zero.errors import MissingNameError

        raise MissingNameError(f"{name} of DeepSpeed does not exist here: {_MISSING[name]}.")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, "errors").partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
