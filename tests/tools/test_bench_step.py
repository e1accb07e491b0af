"""The step benchmark runs, and its record says what its table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_build import ROOT


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench/step.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def test_smoke(swap_path: Path) -> None:
    out = swap_path / "step.jsonl"
    chosen = ["--placements", "cpu/cpu,nvme/nvme", "--checksums", "all,off"]
    ran = bench("--smoke", *chosen, "--dir", str(swap_path), "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    cases = ["compute", "plain", "plain fp32", "cpu/cpu overlapped", "nvme/nvme overlapped"]
    cases.append("nvme/nvme overlapped, checksums off")
    assert record["name"] == "step" and list(record["samples"]) == cases
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    assert record["ratios_to_plain"]["plain"] == 1.0
    assert set(record["bounds_s"]["nvme/nvme overlapped"]) == {"compute", "DRAM", "disk"}
    results = record["results"]
    assert len({each["num_parameters"] for each in results.values()}) == 1, "one model"
    num_parameters = results["plain"]["num_parameters"]
    assert results["nvme/nvme overlapped"]["written_nbytes"] >= 12 * num_parameters, "masters and two moments"
    assert results["plain"]["written_nbytes"] == 0
    assert all(each["peak_rss_nbytes"] > 0 for each in results.values())
    assert all(case.partition(",")[0] in ran.stdout for case in cases)
    assert [path.name for path in swap_path.iterdir()] == ["step.jsonl"], "nothing is left behind"


@pytest.mark.parametrize("arguments", [["--placements", "cpu"], ["--placements", "gpu/cpu"], ["--update", "never"]])
def test_words_that_it_does_not_know_are_refused(arguments: list[str]) -> None:
    ran = bench(*arguments)
    assert ran.returncode == 2 and "expected" in ran.stderr
