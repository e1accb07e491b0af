"""The benchmark of ranks runs, and its record says what its table says."""

from __future__ import annotations

import importlib.util
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
    cases = ["DDP + ZeRO", "stage 1 device/device", "FSDP2 offload", "stage 3 cpu/cpu"]
    ran = bench("--smoke", "--cases", ",".join(cases), "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    assert record["name"] == "ranks" and list(record["samples"]) == ["compute", *cases]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    medians = record["median"]
    for base, case, bar, num_times in zip(cases[::2], cases[1::2], (1.1, 1.25), (2, 3), strict=True):
        assert record["ratios_to_base"][case] == medians[case] / medians[base]
        assert record["bars"][case] == bar
        payload = record["results"][case]["payload"]
        assert 2 <= payload < num_times + 0.5, "reduced once, gathered once, or for each pass; the rest is padding"
    assert record["results"]["DDP + ZeRO"]["payload"] is None
    assert len({each["num_parameters"] for each in record["results"].values()}) == 1, "one model"
    assert all(case in ran.stdout for case in cases)


@pytest.mark.slow
def test_deepspeed_is_left_out_where_it_is_not_installed(tmp_path: Path) -> None:
    out = tmp_path / "ranks.jsonl"
    ran = bench("--smoke", "--cases", "DeepSpeed 2", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    has_it = importlib.util.find_spec("deepspeed") is not None
    assert list(json.loads(out.read_text())["samples"]) == ["compute", *(["DeepSpeed 2"] if has_it else [])]
    assert (f"DeepSpeed 2 is left out: {sys.executable} has no package deepspeed" in ran.stdout) == (not has_it)


@pytest.mark.slow
def test_deepspeed_runs_in_another_python(tmp_path: Path) -> None:
    """One that has no such package, nor any other, is asked, and not this one."""
    other, asked = tmp_path / "python", tmp_path / "asked"
    other.write_text(f"#!/bin/sh\necho $PYTHONPATH:$PATH > {asked}\nexit 1\n")
    other.chmod(0o700)
    ran = bench("--smoke", "--cases", "DeepSpeed 1", "--deepspeed", str(other))
    assert ran.returncode == 0, ran.stderr
    assert f"DeepSpeed 1 is left out: {other} has no package deepspeed" in ran.stdout
    assert asked.read_text().startswith(f":{tmp_path}:"), "its own programs, and not this one's packages"


def test_a_case_that_it_does_not_know_is_refused() -> None:
    ran = bench("--cases", "stage 4 device/device")
    assert ran.returncode == 2 and "expected some of" in ran.stderr
