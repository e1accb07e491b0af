"""tiered_zero: train PyTorch models that are larger than GPU memory, with the same numbers as plain PyTorch.

Weights and optimizer state rest on the device, in host memory or on NVMe. Other errors are in `tiered_zero.errors`, and
DeepSpeed's names in `tiered_zero.deepspeed`. All public names except the errors are imported at their first use, so
that `tiered_zero.record` can be used without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiered_zero import errors as errors
from tiered_zero.errors import ConfigError, PlanError, TieredZeroError
from tiered_zero.version import __version__ as __version__

if TYPE_CHECKING:
    from tiered_zero.api import initialize
    from tiered_zero.config.load import load as load_config
    from tiered_zero.config.schema import Config
    from tiered_zero.data import TrainingLoader
    from tiered_zero.engine.engine import Engine
    from tiered_zero.io.engine import dump_on
    from tiered_zero.plan.planner import Plan
    from tiered_zero.stopping import stop_on_signals
    from tiered_zero.unit.gathered import gathered

_HOMES = {
    "initialize": "api",
    "Engine": "engine.engine",
    "gathered": "unit.gathered",
    "TrainingLoader": "data",
    "stop_on_signals": "stopping",
    "dump_on": "io.engine",
    "load_config": "config.load:load",
    "Config": "config.schema",
    "Plan": "plan.planner",
}
_DEEPSPEED_NAMES = frozenset(
    "DeepSpeedConfigError DeepSpeedEngine accelerator add_config_arguments checkpointing comm get_accelerator "
    "init_distributed ops runtime utils zero".split()
)
"""DeepSpeed's names, for scripts that write `import tiered_zero as deepspeed`."""

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
    "TieredZeroError",
    "ConfigError",
    "PlanError",
]


def __getattr__(name: str) -> Any:
    if name in _DEEPSPEED_NAMES:
        return getattr(importlib.import_module(f"{__name__}.deepspeed"), name)
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; names of DeepSpeed are in tiered_zero.deepspeed"
        )
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
