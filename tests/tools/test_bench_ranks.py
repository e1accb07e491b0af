"""The benchmark of ranks runs, and its record says what its table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native_build import ROOT


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench/ranks.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "ranks.jsonl"
    cases = ["DDP + ZeRO", "FSDP2 offload", "stage 1 device/device", "stage 2 device/cpu"]
    ran = bench("--smoke", "--cases", ",".join(cases), "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    assert record["name"] == "ranks" and list(record["samples"]) == ["compute", *cases]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    medians = record["median"]
    for case in cases[2:]:
        assert record["ratios_to_base"][case] == medians[case] / medians["DDP + ZeRO"]
        assert record["bars"][case] == 1.1
        payload = record["results"][case]["payload"]
        assert 2 <= payload < 2.5, "each parameter is reduced once and gathered once; the rest is padding"
    assert record["results"]["DDP + ZeRO"]["payload"] is None
    assert len({each["num_parameters"] for each in record["results"].values()}) == 1, "one model"
    assert all(case in ran.stdout for case in cases)


def test_a_case_that_it_does_not_know_is_refused() -> None:
    ran = bench("--cases", "stage 4 device/device")
    assert ran.returncode == 2 and "expected some of" in ran.stderr
