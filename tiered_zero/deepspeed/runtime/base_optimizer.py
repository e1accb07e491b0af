"""Name the class of the optimizer that `initialize` returns."""

from tiered_zero.update.handle import TieredOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer"]
