"""tiered_zero: train PyTorch models that are larger than GPU memory, over device, host and NVMe, bit for bit."""

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
