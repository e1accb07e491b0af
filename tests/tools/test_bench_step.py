"""The step benchmark runs, and its record says what its table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.native_build import ROOT


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench/step.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def run_smoke(swap_path: Path, *chosen: str) -> tuple[dict[str, Any], str]:
    out = swap_path / "step.jsonl"
    ran = bench("--smoke", *chosen, "--dir", str(swap_path), "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in swap_path.iterdir()] == ["step.jsonl"], "nothing is left behind"
    return json.loads(out.read_text()), ran.stdout


def test_smoke(swap_path: Path) -> None:
    record, shown = run_smoke(swap_path)
    cases = ["compute", "plain", "plain fp32", "device/device barrier", "cpu/cpu overlapped"]
    cases += ["cpu/nvme overlapped", "nvme/nvme overlapped"]
    assert record["name"] == "step" and list(record["samples"]) == cases, "named after the policy that ran"
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    assert record["ratios_to_plain"]["plain"] == 1.0
    results = record["results"]
    assert len({each["num_parameters"] for each in results.values()}) == 1, "one model"
    num_parameters = results["plain"]["num_parameters"]
    assert results["nvme/nvme overlapped"]["written_nbytes"] >= 12 * num_parameters, "masters and two moments"
    assert results["plain"]["written_nbytes"] == 0
    assert all(each["peak_rss_nbytes"] > 0 for each in results.values())
    assert all(case in shown for case in cases)


def test_the_disks_bound_is_its_rate_at_the_cases_own_ratio_of_reads_and_writes(swap_path: Path) -> None:
    options = "--placements nvme/nvme --update barrier,delayed --checksums off"
    record, _ = run_smoke(swap_path, *options.split())
    rates = record["rates_bytes_per_s"]
    for policy in ("barrier", "delayed"):
        result = record["results"][case := f"nvme/nvme {policy}, checksums off"]
        assert result["update_policy"] == policy
        assert result["disk_bytes_per_s"] == max(rates[case])
        assert set(bounds := record["bounds_s"][case]) == {"compute", "DRAM", "disk"}
        assert bounds["disk"] == (result["read_nbytes"] + result["written_nbytes"]) / result["disk_bytes_per_s"]


def test_a_model_that_plain_pytorch_cannot_hold_is_measured_without_it(swap_path: Path) -> None:
    record, _ = run_smoke(swap_path, "--no-plain", "--placements", "nvme/nvme")
    assert list(record["samples"]) == ["compute", "nvme/nvme overlapped"]
    assert record["ratios_to_plain"] == {}
    assert record["ratios_to_bound"]["nvme/nvme overlapped"] > 0


@pytest.mark.parametrize("arguments", [["--placements", "cpu"], ["--placements", "gpu/cpu"], ["--update", "never"]])
def test_words_that_it_does_not_know_are_refused(arguments: list[str]) -> None:
    ran = bench(*arguments)
    assert ran.returncode == 2 and "expected" in ran.stderr
