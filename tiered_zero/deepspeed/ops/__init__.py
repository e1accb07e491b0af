"""Provide DeepSpeed's optimizers. They are torch's own classes; the engine makes their steps with its own kernel."""

from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]

__compatible_ops__ = {"async_io": True, "cpu_adagrad": True, "cpu_adam": True, "cpu_lion": True}
"""Operators that DeepSpeed would compile, and that need no compiler here."""

__getattr__ = refuse_other_names("ops")
