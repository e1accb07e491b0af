"""Provide DeepSpeed's `launcher`: its command is `tiered-zero launch`."""

from tiered_zero.deepspeed.launcher import runner
from tiered_zero.deepspeed.missing import refuse_other_names

__all__ = ["runner"]

__getattr__ = refuse_other_names("launcher")
