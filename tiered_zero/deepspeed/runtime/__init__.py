"""Provide DeepSpeed's `runtime`: the classes that libraries look for in it."""

from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.deepspeed.runtime import base_optimizer, engine, lr_schedules, zero

__all__ = ["base_optimizer", "engine", "lr_schedules", "zero"]

__getattr__ = refuse_other_names("runtime")
