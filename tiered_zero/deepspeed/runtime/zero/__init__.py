"""Provide DeepSpeed's `runtime.zero`."""

from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.deepspeed.runtime.zero import partition_parameters
from tiered_zero.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init", "partition_parameters"]

__getattr__ = refuse_other_names("runtime.zero")
