"""The acceptance of a GPU runs whole where there is none, on the lagging device or the CPU, and what fails shows."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.support.forked import run_forked
from tests.support.native_build import ROOT

TOOL = ROOT / "tools/gpu_acceptance.py"


SECTIONS_IN_FORKS = """
import os, runpy, subprocess, sys

start = subprocess.run

def run(command, env, timeout):
    if (pid := os.fork()) == 0:
        subprocess.run = start  # what a section itself starts has to end as a program does
        sys.argv = command[1:]
        os.environ |= env
        try:
            runpy.run_path(command[1], run_name="__main__")
        except SystemExit as end:
            os._exit(end.code or 0)
        os._exit(1)
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

subprocess.run = run
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def accept(out: Path, swap_path: Path) -> subprocess.CompletedProcess[str]:
    """The process of its sections is forked from its own."""
    return run_forked("-c", SECTIONS_IN_FORKS, TOOL, "--smoke", "--out", out, "--dir", swap_path)


@pytest.mark.slow
def test_smoke(swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    out = tmp_path / "out"
    ran = accept(out, swap_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = out / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["section"] for line in lines if line["what"] == "end"] == list(runpy.run_path(str(TOOL))["sections"]())
    assert {line["passed"] for line in lines} == {None, True} and list(swap_path.iterdir()) == []
    judged = {line["section"] for line in lines if line["passed"]}
    assert {"failures", "parity", "memory"} <= judged and (out / "trace.json").exists()
    # called again it has nothing to do, and says what has failed
    with open(results, "a") as file:
        file.write(json.dumps({"section": "parity", "what": "cpu/cpu", "passed": False}) + '\n{"section": "cut o')
    again = accept(out, swap_path)
    assert again.returncode == 1 and "1 failed\n  parity: cpu/cpu" in again.stdout
