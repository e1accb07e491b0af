"""The step benchmark runs, and its record says what its table says."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.native_build import ROOT

TOOL = ROOT / "tools/bench/step.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its functions, in this process."""
    monkeypatch.syspath_prepend(ROOT)
    return runpy.run_path(str(TOOL))


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def run_smoke(swap_path: Path, *chosen: str) -> tuple[dict[str, Any], str]:
    out = swap_path / "step.jsonl"
    ran = bench("--smoke", *chosen, "--dir", str(swap_path), "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in swap_path.iterdir()] == ["step.jsonl"], "nothing is left behind"
    return json.loads(out.read_text()), ran.stdout


def test_smoke(swap_path: Path) -> None:
    record, shown = run_smoke(swap_path, "--placements", "device/device,nvme/nvme")
    cases = ["compute", "plain", "plain fp32", "device/device barrier", "nvme/nvme overlapped"]
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
    """And a model that plain PyTorch cannot hold is measured without it."""
    options = "--no-plain --placements nvme/nvme --update barrier,delayed --checksums off"
    record, _ = run_smoke(swap_path, *options.split())
    cases = [f"nvme/nvme {policy}, checksums off" for policy in ("barrier", "delayed")]
    assert list(record["samples"]) == ["compute", *cases]
    assert record["ratios_to_plain"] == {} and min(record["ratios_to_bound"][case] for case in cases) > 0
    rates = record["rates_bytes_per_s"]
    for policy in ("barrier", "delayed"):
        result = record["results"][case := f"nvme/nvme {policy}, checksums off"]
        assert result["update_policy"] == policy
        assert result["disk_bytes_per_s"] == max(rates[case])
        assert set(bounds := record["bounds_s"][case]) == {"compute", "DRAM", "disk"}
        assert bounds["disk"] == (result["read_nbytes"] + result["written_nbytes"]) / result["disk_bytes_per_s"]


@pytest.mark.parametrize("arguments", [["--placements", "cpu"], ["--placements", "gpu/cpu"], ["--update", "never"]])
def test_words_that_it_does_not_know_are_refused(
    tool: dict[str, Any], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool["parse_options"](arguments)
    assert "expected" in capsys.readouterr().err
