"""How many functions of the package the driver thread calls for a save and a load of a tiny model, in how many files.
The limits are what was counted: whoever shortens a walk lowers them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.walks import Walk, host_config, over, record

MOST = {"save": (680, 33), "load": (857, 37)}
"""(calls, files). A save or load that finds a request of the disk under way makes up to 13 calls more."""
MOST_LOAD_RETURNS = 3


@pytest.mark.usefixtures("one_thread")
def test_a_save_and_a_load_stay_short(tmp_path: Path) -> None:
    """Two layers, with everything in host memory; the first save and load are not counted, for they import."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiered_zero.initialize(model=model, config=host_config())[0] as engine:

        def save(tag: str) -> None:
            engine.save_checkpoint(tmp_path, tag=tag)

        walks: dict[str, Walk] = {}
        for tag in ("first", "second"):
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            engine.flush()
            walks = {
                "save": record(lambda tag=tag: save(tag)),  # type: ignore[misc]
                "load": record(lambda tag=tag: engine.load_checkpoint(tmp_path, tag=tag)),  # type: ignore[misc]
            }
    assert over(walks, MOST) == {}
    returns = walks["load"].since("find_checkpoint").returns
    assert len(returns) <= MOST_LOAD_RETURNS, returns
