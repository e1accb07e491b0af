"""Provide DeepSpeed's names: `import tiered_zero.deepspeed as deepspeed`. After `tiered-zero deepspeed-alias install`,
`import deepspeed` gives this package too.

Promise: scripts find the names that they import from DeepSpeed. A name that does not exist here raises an error that
says what to do. All modules are imported with the package, so both package names lead to the same modules. Owner: owns
nothing. Never: implements a mechanism; it calls the rest of tiered_zero.
"""

from __future__ import annotations

import sys
from types import ModuleType

from tiered_zero.api import add_config_arguments
from tiered_zero.deepspeed import accelerator, checkpointing, comm, ops, runtime, utils, zero
from tiered_zero.deepspeed.accelerator import get_accelerator
from tiered_zero.deepspeed.comm import init_distributed
from tiered_zero.deepspeed.missing import MISSING, MissingModule, refuse_other_names
from tiered_zero.deepspeed.runtime import DeepSpeedEngine, initialize
from tiered_zero.errors import ConfigError as DeepSpeedConfigError
from tiered_zero.version import DEEPSPEED_VERSION

__version__ = DEEPSPEED_VERSION

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]

SUBMODULES = {
    "checkpoint": utils,
    "checkpoint.utils": utils,
    "launcher": utils,
    "launcher.runner": utils,
    "ops.adagrad": ops,
    "ops.adam": ops,
    "ops.lion": ops,
    "runtime.base_optimizer": runtime,
    "runtime.engine": runtime,
    "runtime.lr_schedules": runtime,
    "runtime.zero": zero,
    "runtime.zero.partition_parameters": zero,
    "utils.logging": utils,
    "utils.zero_to_fp32": utils,
}
"""Path of a module of DeepSpeed -> the module here that has its names."""

__getattr__ = refuse_other_names()

for _path, _module in SUBMODULES.items():
    _around, _, _name = f"{__name__}.{_path}".rpartition(".")
    sys.modules[f"{__name__}.{_path}"] = _module
    setattr(sys.modules[_around], _name, _module)

for _name in MISSING:
    sys.modules.setdefault(f"{__name__}.{_name}", MissingModule(f"{__name__}.{_name}"))  # `comm` exists


def modules_named(name: str) -> dict[str, ModuleType]:
    """Return name -> module for this package and its modules. `name` replaces the package's own name: for "deepspeed",
    the names are "deepspeed", "deepspeed.zero" and so on."""
    return {
        name + path.removeprefix(__name__): module
        for path, module in sys.modules.items()
        if path == __name__ or path.startswith(f"{__name__}.")
    }
