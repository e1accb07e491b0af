"""How many functions of the package the driver thread calls for a save and a load of a tiny model: a reader of the code
walks as far. Each bound is somewhat above what was counted when it was set."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero

PACKAGE = str(Path(tiered_zero.__file__).parent)
MOST_CALLS = {"save": 900, "load": 1200}


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


@pytest.mark.usefixtures("one_thread")
def test_a_save_and_a_load_stay_short(tmp_path: Path) -> None:
    """Two layers, with everything in host memory; the first save and load are not counted, for they import."""
    host = {"device": "cpu"}
    config = {
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
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiered_zero.initialize(model=model, config=config)[0] as engine:

        def save(tag: str) -> None:
            engine.save_checkpoint(tmp_path, tag=tag)
            engine.flush()

        counted = {}
        for tag in ("first", "second"):
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            engine.flush()
            counted = {
                "save": count_calls(lambda tag=tag: save(tag)),  # type: ignore[misc]
                "load": count_calls(lambda tag=tag: engine.load_checkpoint(tmp_path, tag=tag)),  # type: ignore[misc]
            }
    assert {name: calls for name, calls in counted.items() if calls > MOST_CALLS[name]} == {}, counted
