"""The checkpoint benchmark runs with every case in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.native_build import ROOT


def test_smoke(swap_path: Path) -> None:
    out = swap_path / "checkpoint.jsonl"
    command = [sys.executable, str(ROOT / "tools/bench/checkpoint.py"), "--smoke", "--dir", str(swap_path)]
    ran = subprocess.run([*command, "--out", str(out)], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in swap_path.iterdir()] == ["checkpoint.jsonl"], "nothing is left behind"
    record = json.loads(out.read_text())
    series = {"save", "torch.save", "load", "torch.load", "four syncs", "commit in place"}
    assert record["name"] == "checkpoint" and series | {"step alone"} <= set(record["samples"])
    assert all(min(samples) > 0 for samples in record["samples"].values())
    assert record["full_nbytes"] >= 12 * 3 * 64 * 64, "masters and two moments"
    assert record["commit_to_bound"] > 0 and record["ratios_to_fio"] == {"save": None, "load": None}
