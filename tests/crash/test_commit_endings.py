"""However a process with in-place commits ends, its swap directory stays, counts as resumable, and is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tiered_zero
from tests.crash.run_commits import config, digest, take_step
from tests.support.inspection.insides import collect_garbage, list_runs
from tests.support.models import ParityGPT
from tiered_zero.cli.main import main

PROGRAM = """
from tests.crash.run_commits import *
freeze_imports()
while line := sys.stdin.readline():
    swap_path, saved, how = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    print(os.getpid(), flush=True)
    torch.manual_seed(0)
    settings = config(swap_path, "auto", "fp32", {"in_place": True})
    engine = tiered_zero.initialize(model=ParityGPT(), config=settings)[0]
    for step in range(2):
        take_step(engine, step)
        engine.save_checkpoint(saved)
    take_step(engine, 2)  # and is not saved
    print(digest(engine), flush=True)
    if how == "raise":
        raise RuntimeError("the script failed")
    time.sleep(500 if how == "wait" else 0)
    break
"""
"""Forks a process for each ending after its imports, and says how it ended; that one ends as every interpreter does."""

ENDINGS = {"end": ("end", None), "raise": ("raise", None), "SIGTERM": ("wait", signal.SIGTERM)}
ENDINGS["Ctrl-C"] = ("wait", signal.SIGINT)
Program = subprocess.Popen[str]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    command = [sys.executable, "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_directory_stays_and_is_gone_on_with(
    program: Program, tmp_path: Path, swap_path: Path, ending: str
) -> None:
    how, number = ENDINGS[ending]
    saved = tmp_path / "saved"
    assert program.stdin is not None and program.stdout is not None
    print(json.dumps([str(swap_path), str(saved), how]), file=program.stdin, flush=True)
    child, after_three = int(program.stdout.readline()), program.stdout.readline().strip()
    if number is not None:
        os.kill(child, number)
    status = int(program.stdout.readline())
    assert status == {"end": 0, "raise": 1, "SIGTERM": -signal.SIGTERM, "Ctrl-C": -signal.SIGINT}[ending]
    (run,) = [run for run in list_runs(swap_path) if run.resumable]
    assert (run.state, run.step) == ("dead", 2)
    (kept,) = [each for each in collect_garbage(swap_path) if each.run.resumable]
    assert list(swap_path.iterdir()) == [run.path], "what SIGTERM leaves of parameters is removed"
    assert not kept.removed and "may be resumed from its committed state" in kept.reason
    shown = CliRunner().invoke(main, ["checkpoint", "verify", str(run.path)])
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
