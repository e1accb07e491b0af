"""A forked child ends, whatever it does with the engine of its parent, and the parent trains on with the same bits."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWNS_NOTHING = ("end", "drop", "close", "leave the block", "SIGTERM")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("policy", ["barrier", "overlapped", "delayed"])
def test_a_forked_child_ends_and_damages_nothing(swap_path: Path, policy: str) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/crash/run_forks.py"), str(swap_path), policy],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    *children, parent = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(children) == 15
    for child in children:
        ended = -signal.SIGTERM if child["way"] == "SIGTERM" else 0
        assert child["status"] == ended, child
        if child["way"] in OWNS_NOTHING:
            assert child["met"] == "", child
        else:
            assert child["met"].startswith("ModelError: This engine belongs to process "), child
    assert parent == {"failure": "None", "wrong": [], "left": []}
