"""The acceptance of a GPU runs whole where there is none, on the lagging device or the CPU, and what fails shows."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native_build import ROOT

TOOL = ROOT / "tools/gpu_acceptance.py"


def accept(out: Path, swap_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--smoke", "--out", str(out), "--dir", str(swap_path)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


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
