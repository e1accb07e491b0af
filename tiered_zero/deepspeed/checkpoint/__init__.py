"""Provide DeepSpeed's `checkpoint`."""

from tiered_zero.deepspeed.checkpoint import utils
from tiered_zero.deepspeed.missing import refuse_other_names

__all__ = ["utils"]

__getattr__ = refuse_other_names("checkpoint")
