"""Provide DeepSpeed's logger: the one of this package."""

from __future__ import annotations

import logging
from collections.abc import Sequence

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("tiered_zero")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` if `ranks` is None, or has rank 0 or -1 (all ranks)."""
    if ranks is None or 0 in ranks or -1 in ranks:
        logger.log(level, "%s", message)
