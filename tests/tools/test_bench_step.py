"""The step benchmark runs, and its record says what its table says."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import call_in_fork
from tests.support.native_build import ROOT

Smoke = Callable[..., tuple[dict[str, Any], str]]
"""Runs the benchmark with these options; returns its record, and what it printed."""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tools.bench.step")


@pytest.fixture
def run_smoke(tool: Any, swap_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Smoke:
    """Plain PyTorch in a process of its own, as it stands; what is measured besides in one that is forked."""
    in_a_process = tool.run_task

    def run_task(task: Any) -> Any:
        return in_a_process(task) if task.case == "plain" else call_in_fork(tool.measure_task, task)

    def run(*chosen: str) -> tuple[dict[str, Any], str]:
        out = swap_path / "step.jsonl"
        tool.main(["--smoke", *chosen, "--dir", str(swap_path), "--out", str(out)])
        assert [path.name for path in swap_path.iterdir()] == ["step.jsonl"], "nothing is left behind"
        return json.loads(out.read_text()), capsys.readouterr().out

    monkeypatch.setattr(tool, "run_task", run_task)
    return run


def test_smoke(run_smoke: Smoke) -> None:
    record, shown = run_smoke("--placements", "device/device,nvme/nvme")
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


def test_the_disks_bound_is_its_rate_at_the_cases_own_ratio_of_reads_and_writes(run_smoke: Smoke) -> None:
    """And a model that plain PyTorch cannot hold is measured without it."""
    options = "--no-plain --placements nvme/nvme --update barrier,delayed --checksums off"
    record, _ = run_smoke(*options.split())
    cases = [f"nvme/nvme {policy}, checksums off" for policy in ("barrier", "delayed")]
    assert list(record["samples"]) == ["compute", *cases]
    assert record["ratios_to_plain"] == {} and min(record["ratios_to_bound"][case] for case in cases) > 0
    rates = record["rates_bytes_per_s"]
    for policy in ("barrier", "delayed"):
        result = record["results"][case := f"nvme/nvme {policy}, checksums off"]
        assert result["update_policy"] == policy
        assert result["disk_bytes_per_s"] == max(rates[case])
        assert set(bounds := record["bounds_s"][case]) == {"compute and update", "disk"}
        assert bounds["disk"] == (result["read_nbytes"] + result["written_nbytes"]) / result["disk_bytes_per_s"]


@pytest.mark.parametrize("arguments", [["--placements", "cpu"], ["--placements", "gpu/cpu"], ["--update", "never"]])
def test_words_that_it_does_not_know_are_refused(
    tool: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.parse_options(arguments)
    assert "expected" in capsys.readouterr().err
