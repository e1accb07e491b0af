"""A forked child ends, whatever it does with the engine of its parent, and the parent trains on with the same bits."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.run_forks import OWNS_NOTHING

ROOT = Path(__file__).parents[2]
POLICIES = ["overlapped", "delayed"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one program prints, which forks from a run of each policy."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/crash/run_forks.py"), str(tmp_path_factory.mktemp("swap")), *POLICIES],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forked_child_ends_and_damages_nothing(lines: list[str], policy: str) -> None:
    *children, parent = [found for found in map(json.loads, lines) if found.pop("policy") == policy]
    assert len(children) == (15 if policy == POLICIES[0] else len(OWNS_NOTHING))
    for child in children:
        ended = -signal.SIGTERM if child["way"] == "SIGTERM" else 0
        assert child["status"] == ended, child
        if child["way"] in OWNS_NOTHING:
            assert child["met"] == "", child
        else:
            assert child["met"].startswith("ModelError: This engine belongs to process "), child
    assert parent == {"failure": "None", "wrong": [], "left": []}
