"""DeepSpeed's `comm` namespace, for one rank."""

from __future__ import annotations

from typing import Any

from tiered_zero.hardware.collectives import SingleRank, barrier, get_rank, get_world_size, is_initialized

__all__ = ["barrier", "get_local_rank", "get_rank", "get_world_size", "init_distributed", "is_initialized"]


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
    """A process group of one rank, if there is none. Raises ModelError where more than one rank runs."""
    SingleRank().ensure_process_group(dist_init_required)


def get_local_rank() -> int:
    """This process's rank on its host."""
    return get_rank()
