"""The benchmark of the I/O engines runs, and leaves a record and nothing else."""

import json
import os
from pathlib import Path

from tests.support.forked import run_forked
from tests.support.native_build import ROOT


def test_smoke(native_dir: Path, swap_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "records" / "io.jsonl"
    environment = {**os.environ, "TIERED_ZERO_NATIVE_DIR": str(native_dir)}
    ran = run_forked(ROOT / "tools/bench/io.py", "--smoke", "--dir", swap_path, "--out", out, env=environment)
    assert ran.returncode == 0, ran.stderr
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["name"] == "io" and record["arguments"]["smoke"] and record["unit"] == "GB/s"
    names = {
        f"{e} {m}{s}"
        for e in ("native", "aiofiles")
        for m in ("read", "write", "mixed")
        for s in ("", " beside Python")
    }
    assert set(record["samples"]) == set(record["median"]) == names
    assert all(median > 0 for median in record["median"].values())
    assert os.listdir(swap_path) == []
