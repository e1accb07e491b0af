"""DeepSpeed's Lion."""

from tiered_zero.rules.native_rules import Lion as DeepSpeedCPULion
from tiered_zero.rules.native_rules import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
