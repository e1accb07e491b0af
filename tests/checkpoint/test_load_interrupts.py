"""Ctrl-C in a load: which values it leaves, and whether training can go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.inspection import differences, everything
from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered
from tiered_zero.checkpoint import checkpoints
from tiered_zero.checkpoint.load import StateLoader
from tiered_zero.errors import EngineFailedError


@pytest.mark.parametrize("at", ["check", "read"])
def test_one_interrupt_of_a_load_leaves_the_old_values_or_all_new_ones(
    at: str, swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first value is overwritten it ends the call; then it waits for the last. A second one latches."""
    place = {"check": (checkpoints, "match"), "read": (StateLoader, "load")}[at]
    original, num_signals = getattr(*place), 1

    def interrupted(*args: Any, **options: Any) -> Any:
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **options)

    with tiered(ParityGPT(num_blocks=1), swap_path) as engine:
        saved = everything(engine)
        engine.save_checkpoint(tmp_path / "saved")
        engine.backward(engine(*batch(0)))
        engine.step()
        before = everything(engine)
        monkeypatch.setattr(*place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.load_checkpoint(tmp_path / "saved")
        expected = before if at == "check" else saved
        assert differences(expected, everything(engine)) == []
        if at == "check":
            return
        num_signals = 2
        with pytest.raises(KeyboardInterrupt):
            engine.load_checkpoint(tmp_path / "saved")
        with pytest.raises(EngineFailedError, match="ended in its middle"):
            engine.save_checkpoint(tmp_path / "other")
