"""Provide optimizers for any training loop, without an engine: their state rests on tiers or is split over ranks.

`OffloadedOptimizer` is a torch optimizer whose state rests in host memory or swap files. A step reads the state,
sub-group by sub-group, through the update pipeline of the engine; the user's loop owns the gradients and parameters.
`ZeroRedundancyOptimizer` lets each rank step its share of the parameters and broadcast them; its local optimizer is
plain or offloaded.

Owner: the user's loop owns parameters, gradients, clipping, accumulation and schedules; each optimizer owns its state,
and its threads and files until `close()`. Never: needs a process group on a single rank, or a config file.
"""

from tiered_zero.optim.offloaded import OffloadedOptimizer
from tiered_zero.optim.zero_redundancy import ZeroRedundancyOptimizer

__all__ = ["OffloadedOptimizer", "ZeroRedundancyOptimizer"]
