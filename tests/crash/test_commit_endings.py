"""However a process with in-place commits ends, its swap directory stays, counts as resumable, and is gone on with."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tiered_zero
from tests.crash.run_commits import config, digest, take_step
from tests.support.models import ParityGPT
from tiered_zero.cli.main import main
from tiered_zero.store.runs import collect_garbage, list_runs

PROGRAM = """
import sys, time, torch, tiered_zero
from tests.crash.run_commits import *
torch.manual_seed(0)
engine = tiered_zero.initialize(model=ParityGPT(), config=config(sys.argv[1], "auto", "fp32", {"in_place": True}))[0]
for step in range(2):
    take_step(engine, step)
    engine.save_checkpoint(sys.argv[2])
engine.flush()
take_step(engine, 2)  # and is not saved
print(digest(engine), flush=True)
if sys.argv[3] == "raise":
    raise RuntimeError("the script failed")
time.sleep(500 if sys.argv[3] == "wait" else 0)
"""
ENDINGS = {"end": ("end", None), "raise": ("raise", None), "SIGTERM": ("wait", signal.SIGTERM)}
ENDINGS["Ctrl-C"] = ("wait", signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_directory_stays_and_is_gone_on_with(tmp_path: Path, swap_path: Path, ending: str) -> None:
    how, number = ENDINGS[ending]
    saved = tmp_path / "saved"
    program = [sys.executable, "-c", PROGRAM, str(swap_path), str(saved), how]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        after_three = process.stdout.readline().strip()
        if number is not None:
            process.send_signal(number)
        status = process.wait()
    assert status == {"end": 0, "raise": 1, "SIGTERM": -signal.SIGTERM, "Ctrl-C": -signal.SIGINT}[ending]
    (run,) = list_runs(swap_path)
    assert (run.state, run.step, run.resumable) == ("dead", 2, True)
    (kept,) = collect_garbage(swap_path)
    assert not kept.removed and "may be resumed from its committed state" in kept.reason
    shown = CliRunner().invoke(main, ["swap", "verify", str(swap_path)])
    assert shown.exit_code == 0 and "whole" in shown.output
    out = CliRunner().invoke(main, ["checkpoint", "export", str(saved), str(tmp_path / "out")])
    assert out.exit_code == 0, out.output
    torch.manual_seed(9)
    settings = config(swap_path, "auto", "fp32", {"in_place": True, "resume": str(saved)})
    with tiered_zero.initialize(model=ParityGPT(), config=settings)[0] as engine:
        assert engine.global_steps == 2
        take_step(engine, 2)
        assert digest(engine) == after_three
    (removed,) = collect_garbage(swap_path, committed=True, unknown=True)
    assert removed.removed
