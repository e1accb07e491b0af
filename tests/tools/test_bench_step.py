"""The step benchmark runs, and its record says what its table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import step


def test_smoke(swap_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = swap_path / "step.jsonl"
    report = step.main(["--smoke", "--placements", "nvme/nvme", "--dir", str(swap_path), "--out", str(out)])
    record = json.loads(out.read_text())
    cases = ["compute", "plain", "plain fp32", "nvme/nvme overlapped"]
    assert record["name"] == "step" and list(record["samples"]) == cases
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    assert record["ratios_to_plain"]["plain"] == 1.0 and record["ratios_to_plain"] == report["ratios_to_plain"]
    assert set(record["bounds_s"]["nvme/nvme overlapped"]) == {"compute", "DRAM", "disk"}
    results = record["results"]
    assert len({each["num_parameters"] for each in results.values()}) == 1, "one model"
    num_parameters = results["plain"]["num_parameters"]
    assert results["nvme/nvme overlapped"]["written_nbytes"] >= 12 * num_parameters, "masters and two moments"
    assert results["plain"]["written_nbytes"] == 0
    assert all(each["peak_rss_nbytes"] > 0 for each in results.values())
    table = capsys.readouterr().out
    assert all(case in table for case in cases)
    assert [path.name for path in swap_path.iterdir()] == ["step.jsonl"], "nothing is left behind"


@pytest.mark.parametrize("arguments", [["--placements", "cpu"], ["--placements", "gpu/cpu"], ["--update", "never"]])
def test_words_that_it_does_not_know_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        step.main(arguments)
