"""torchrun restarts ranks of which one was killed: they go on from the last commit, and end with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.torchrun import SCRIPTS, forked


def test_killed_ranks_are_restarted_and_end_with_the_same_bits(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_MAX_RESTARTS", "2")
    with forked([str(SCRIPTS / "run_restarts.py"), str(tmp_path), str(swap_path)], tmp_path) as launch:
        assert launch.wait() == 0, launch.output[-8000:]
    for rank in range(2):
        restarted, unbroken = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (restarted["attempt"], restarted["begun"], unbroken["begun"]) == (1, 2, 0)
        assert restarted["weights"] == unbroken["weights"]
    assert not [*swap_path.iterdir()], "what the killed attempt had on disk is removed"
