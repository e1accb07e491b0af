"""The checkpoint benchmark runs with every case in it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.forked import run_forked
from tests.support.native_build import ROOT


def test_smoke(swap_path: Path) -> None:
    out = swap_path / "checkpoint.jsonl"
    ran = run_forked(ROOT / "tools/bench/checkpoint.py", "--smoke", "--dir", swap_path, "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in swap_path.iterdir()] == ["checkpoint.jsonl"], "nothing is left behind"
    record = json.loads(out.read_text())
    series = {"save", "torch.save", "load", "torch.load", "four syncs", "commit in place"}
    assert record["name"] == "checkpoint" and series | {"step alone"} <= set(record["samples"])
    assert all(min(samples) > 0 for samples in record["samples"].values())
    assert record["full_nbytes"] >= 12 * 3 * 64 * 64, "masters and two moments"
    assert record["commit_to_bound"] > 0 and record["ratios_to_fio"] == {"save": None, "load": None}


FAILING_SAVE = """
import runpy, sys
from tests.support.inspection.insides import TagWriter
from tiered_zero.errors import StoreError

def publish(*arguments, **options):
    raise StoreError("the disk is gone")

TagWriter.publish = publish
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_asynchronous_save_that_fails_ends_the_measurement(swap_path: Path) -> None:
    tool = ROOT / "tools/bench/checkpoint.py"
    ran = run_forked("-c", FAILING_SAVE, tool, "--smoke", "--cases", "async", "--dir", swap_path)
    assert ran.returncode == 1 and "StoreError: the disk is gone" in ran.stderr, ran.stderr
