"""Provide optimizers for any training loop, without an engine: their state rests on tiers or is split over ranks.

Owner: the user's loop owns parameters and gradients. Each optimizer owns its state, threads and files until `close()`.
Never: needs a config file, or a process group if there is only one rank."""

from tiered_zero.optim.offloaded import OffloadedOptimizer
from tiered_zero.optim.zero_redundancy import ZeroRedundancyOptimizer

__all__ = ["OffloadedOptimizer", "ZeroRedundancyOptimizer"]
