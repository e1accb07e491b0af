"""kill -9 at random moments of training runs with in-place commits: each goes on with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash import run_commits
from tiered_zero.store.runs import list_runs

CASES = [("overlapped", "fp32"), ("barrier", "fp32"), ("overlapped", "bf16_remainder")]


def kill_and_go_on(tmp_path: Path, swap_path: Path, num_kills: int, seed: int, update: str, state_format: str) -> int:
    """How many processes were killed."""
    save_dir = tmp_path / "saved"
    save_dir.mkdir(mode=0o700)
    program = [sys.executable, "-m", run_commits.__name__, str(swap_path), str(save_dir), str(num_kills), str(seed)]
    root = Path(__file__).parents[2]
    done = subprocess.run([*program, update, state_format], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected, durable, killed = found["expected"], 0, 0
    num_steps = len(expected) - 1
    for process in found["processes"]:
        for line in process["lines"]:
            if "digest" in line:
                assert line["step"] >= durable, f"a durable step was lost ({seed=}): {line}, {durable=}"
                assert line["digest"] == expected[line["step"]], f"other bits at step {line['step']} ({seed=})"
            durable = max(durable, line.get("durable", 0))
        if not process["ended"]:
            killed += 1
            assert process["status"] == 9
    last = found["processes"][-1]["lines"][-1]
    assert last == {"step": num_steps, "digest": expected[-1], "ended": True}, done.stderr[-4000:]
    runs = [run for run in list_runs(swap_path) if run.resumable]  # a kill before the first tag leaves an older one
    assert max((run.step or 0, run.state) for run in runs) == (num_steps, "dead")
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(("update", "state_format"), CASES)
def test_ten_kills(tmp_path: Path, swap_path: Path, update: str, state_format: str) -> None:
    assert kill_and_go_on(tmp_path, swap_path, 10, 1, update, state_format) == 10


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 12))
def test_three_hundred_kills(tmp_path: Path, swap_path: Path, seed: int) -> None:
    assert kill_and_go_on(tmp_path, swap_path, 30, seed, *CASES[seed % len(CASES)]) == 30
