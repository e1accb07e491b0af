"""Count the calls of the package's functions on the calling thread: a reader of the code walks as far."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tiered_zero

PACKAGE = str(Path(tiered_zero.__file__).parent)


def host_config() -> dict[str, Any]:
    """Everything is in host memory, and each unit is paged onto a device that is the CPU too."""
    host = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": host,
            "offload_optimizer": host,
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"device": "cpu", "device_memory_limit": "1GiB"},
    }


def count_calls(act: Callable[[], Any]) -> int:
    """Comprehensions, and each turn of a generator, count too."""
    num_calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return num_calls


def over(counted: dict[str, float], most: dict[str, int]) -> dict[str, float]:
    """What was counted above its bound."""
    return {name: calls for name, calls in counted.items() if calls > most[name]}
