"""Provide DeepSpeed's Lion."""

from __future__ import annotations

from typing import Any

from tiered_zero.rules.native_rules import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


def DeepSpeedCPULion(model_params: Any, *args: Any, adamw_mode: bool = False, **options: Any) -> FusedLion:
    """Make a Lion. `adamw_mode`: no effect; Accelerate passes it to every optimizer."""
    return FusedLion(model_params, *args, **options)
