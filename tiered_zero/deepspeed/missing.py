"""Refuse names and modules of DeepSpeed that do not exist here, with an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from tiered_zero.errors import MissingModuleError, MissingNameError

_EVALUATE = "give initialize() no optimizer, and call the engine: it evaluates"
_ONE_RANK = "this version does not split a model's modules over ranks; ZeRO stage 3 shards their parameters"
_NUMBERS = "engine.step_report, engine.memory_report() and tiered_zero.report have the numbers"
_TORCH_OPTIMIZER = "name the optimizer in the config, or pass any of torch's to initialize()"
MISSING = {
    "autotuning": "tiered-zero plan shows the bytes of a config, tiered-zero bench io the rates of a disk",
    "checkpointing.get_cuda_rng_tracker": _ONE_RANK,
    "checkpointing.model_parallel_cuda_manual_seed": _ONE_RANK,
    "comm": "take torch.distributed's",
    "compression": "compress the model before or after training",
    "default_inference_config": _EVALUATE,
    "elasticity": "write the batch size into the config; a checkpoint loads with any number of ranks",
    "inference": _EVALUATE,
    "InferenceEngine": _EVALUATE,
    "init_inference": _EVALUATE,
    "linear": "take LoRA from peft: frozen parameters are paged too",
    "model_implementations": _EVALUATE,
    "module_inject": _EVALUATE,
    "moe": _ONE_RANK,
    "monitor": _NUMBERS,
    "OnDevice": "build the model under torch.device('meta')",
    "ops.lamb": _TORCH_OPTIMIZER,
    "ops.op_builder": "nothing is compiled at first use; tiered-zero doctor shows what works",
    "pipe": _ONE_RANK,
    "PipelineEngine": _ONE_RANK,
    "PipelineModule": _ONE_RANK,
    "profiling": _NUMBERS,
    "runtime.config": "tiered_zero.load_config reads a config",
    "runtime.fp16": 'write "fp16": {"enabled": true} into the config',
    "runtime.pipe": _ONE_RANK,
    "runtime.sequence_parallel": _ONE_RANK,
    "runtime.utils": _NUMBERS,
    "runtime.zero.config": "write the section zero_optimization into the config; engine.config has it",
    "runtime.zero.stage3": "tiered-zero plan shows the bytes of a config on each tier, before a run",
    "sequence": _ONE_RANK,
    "tp_model_init": _ONE_RANK,
    "utils.groups": _ONE_RANK,
    "utils.timer": _NUMBERS,
    "zero.config": "write the section zero_optimization into the config; engine.config has it",
    "zero.stage3": "tiered-zero plan shows the bytes of a config on each tier, before a run",
    "zero.TiledLinear": "a linear layer is fetched whole; set tiered_zero.unit_size_cap to a number that holds it",
}
"""Path of a module or name that does not exist here -> what to do instead. A module's entry holds for its content
too."""
_ANY = "docs/migrating.md lists what scripts take of DeepSpeed, and what does the same here"


def _remedy(path: str) -> str:
    """Return what to do instead of using `path`: the entry of MISSING for it, or for the nearest module around it."""
    while path not in MISSING and "." in path:
        path = path.rpartition(".")[0]
    return MISSING.get(path, _ANY)


def refuse_other_names(module: str = "") -> Callable[[str], Any]:
    """Return a `__getattr__` that raises MissingNameError for names of DeepSpeed's `module`. `module`: its path without
    "deepspeed."; "" for the package."""

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{module}.{name}".lstrip(".")
        raise MissingNameError(f"deepspeed.{path} does not exist here: {_remedy(path)}.")

    return refuse


class MissingModule(ModuleType):
    """An entry in `sys.modules` for a module or name that does not exist here. Importing it succeeds. Importing a name
    from it raises MissingModuleError. Any other use raises MissingNameError."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.partition(".deepspeed.")[2]
        if name == "__path__":  # read when a name or module in it is imported
            raise MissingModuleError(f"deepspeed.{path} does not exist here: {_remedy(path)}.", name=self.__name__)
        return refuse_other_names(path)(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parent, _, name = self.__name__.partition(".deepspeed.")[2].rpartition(".")
        return refuse_other_names(parent)(name)

    __mro_entries__ = __call__
