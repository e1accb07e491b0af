"""What a config may not ask of many ranks."""

from __future__ import annotations

from typing import Any

from tiered_zero.config.schema import Config
from tiered_zero.errors import ModelError


def check_ranks(config: Config, world_size: int) -> None:
    """Raise ModelError for what this version does not do with more ranks than one, each by its name."""
    if world_size == 1:
        return
    zero, settings = config.zero_optimization, config.tiered_zero
    many = f"{world_size} ranks"
    if settings.update == "delayed" and zero.stage in (1, 2):
        raise ModelError(
            f"tiered_zero.update: expected auto or barrier at stage {zero.stage} with {many}, which gather each "
            "other's new parameters inside step(); found 'delayed'. Leave it out, or set zero_optimization.stage to 0 "
            "or 3."
        )


def idle_value(config: Config, path: str, default: Any) -> Any:
    """Return what the file says of a key that has no effect on one rank."""
    return next((report.value for report in config.explain() if report.path == path), default)
