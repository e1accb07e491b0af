"""How many functions of the package the driver thread calls for a save and a load of a tiny model: a reader of the code
walks as far. Each bound is somewhat above what was counted when it was set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.walks import count_calls, host_config, over

MOST_CALLS = {"save": 830, "load": 1050}


@pytest.mark.usefixtures("one_thread")
def test_a_save_and_a_load_stay_short(tmp_path: Path) -> None:
    """Two layers, with everything in host memory; the first save and load are not counted, for they import."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiered_zero.initialize(model=model, config=host_config())[0] as engine:

        def save(tag: str) -> None:
            engine.save_checkpoint(tmp_path, tag=tag)

        counted: dict[str, float] = {}
        for tag in ("first", "second"):
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            engine.flush()
            counted = {
                "save": count_calls(lambda tag=tag: save(tag)),  # type: ignore[misc]
                "load": count_calls(lambda tag=tag: engine.load_checkpoint(tmp_path, tag=tag)),  # type: ignore[misc]
            }
    assert over(counted, MOST_CALLS) == {}, counted
