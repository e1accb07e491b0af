"""tiered_zero: train PyTorch models that are larger than GPU memory, over device, host and NVMe, bit for bit.

The public names are imported when they are first asked for, so that `tiered_zero.store` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_zero.api import initialize
    from tiered_zero.config.load import load as load_config
    from tiered_zero.config.schema import Config
    from tiered_zero.engine import Engine
    from tiered_zero.errors import (
        BudgetError,
        ConfigError,
        CorruptionError,
        LatchedError,
        ModelError,
        NonFiniteError,
        ParameterAwayError,
        PlanError,
        StoreError,
        TieredZeroError,
        TransferError,
    )
    from tiered_zero.params.lending import gathered
    from tiered_zero.plan.planner import Plan

__version__ = "0.1.0"

_HOMES = {
    "initialize": "api",
    "load_config": "config.load:load",
    "Config": "config.schema",
    "Engine": "engine",
    "gathered": "params.lending",
    "Plan": "plan.planner",
}

__all__ = [
    "BudgetError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "Engine",
    "LatchedError",
    "ModelError",
    "NonFiniteError",
    "ParameterAwayError",
    "Plan",
    "PlanError",
    "StoreError",
    "TieredZeroError",
    "TransferError",
    "gathered",
    "initialize",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, "errors").partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
