"""Provide DeepSpeed's `comm`: open the process group, and return this process's rank on its host."""

from __future__ import annotations

from typing import Any

from tiered_zero.deepspeed.missing import refuse_other_names
from tiered_zero.hardware.ranks.collectives import open_default_group
from tiered_zero.hardware.ranks.launcher import barrier, get_rank, get_world_size, is_initialized, local_rank

__all__ = ["barrier", "get_local_rank", "get_rank", "get_world_size", "init_distributed", "is_initialized"]

__getattr__ = refuse_other_names("comm")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch's default process group if there is none. Without a launcher the group has one rank. `timeout`:
    a timedelta; None: half an hour. `dist_init_required`: False: never initialize the group. The other arguments have
    no effect. Raises ModelError and RankError."""
    open_default_group(timeout.total_seconds() if timeout is not None else 1800.0, dist_init_required)


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    return local_rank()
