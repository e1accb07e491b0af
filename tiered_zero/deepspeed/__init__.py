"""Provide DeepSpeed's names: `import tiered_zero.deepspeed as deepspeed`, or `import deepspeed` where `tiered-zero
deepspeed-alias install` has written a distribution of that name.

Promise: scripts and libraries find the names that they import from DeepSpeed; a name that does not exist here raises an
error that says what to do. Every module is imported with the package: it has one copy under both names.
Owner: owns nothing. Never: implements a mechanism; it calls the rest of tiered_zero.
"""

from __future__ import annotations

import sys
from types import ModuleType

from tiered_zero.api import add_config_arguments
from tiered_zero.deepspeed import (
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    launcher,
    ops,
    runtime,
    utils,
    zero,
)
from tiered_zero.deepspeed.accelerator import get_accelerator
from tiered_zero.deepspeed.comm import init_distributed
from tiered_zero.deepspeed.missing import MISSING, MissingModule, refuse_other_names
from tiered_zero.deepspeed.runtime.engine import DeepSpeedEngine, initialize
from tiered_zero.errors import ConfigError as DeepSpeedConfigError

__version__ = "0.19.8+tiered.zero"
"""The version of DeepSpeed whose names are here: libraries compare it with the version that they need."""

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "launcher",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__getattr__ = refuse_other_names()

for _name in MISSING:
    sys.modules.setdefault(f"{__name__}.{_name}", MissingModule(f"{__name__}.{_name}"))  # comm is here


def modules_named(name: str) -> dict[str, ModuleType]:
    """Return this package and its modules, each under the name that it has in a package called `name`."""
    return {
        name + path.removeprefix(__name__): module
        for path, module in sys.modules.items()
        if path == __name__ or path.startswith(f"{__name__}.")
    }
