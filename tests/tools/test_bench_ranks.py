"""The benchmark of ranks runs, and its record says what its table says."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.support.native_build import ROOT


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("tools.bench.ranks")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cases", "bar", "num_times"),
    [(["DDP + ZeRO", "stage 1 device/device"], 1.1, 2), (["FSDP2 offload", "stage 3 cpu/cpu"], 1.25, 3)],
)
def test_smoke(
    tool: Any,
    ranks: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cases: list[str],
    bar: float,
    num_times: int,
) -> None:
    """The last case under torchrun, as it stands; the others by ranks that are there."""
    out = tmp_path / "ranks.jsonl"
    under_torchrun = tool.run_task

    def run_task(task: Any, num_ranks: int, python: str) -> Any:
        if task.case == cases[-1] or task.case in tool.DEEPSPEED:
            return under_torchrun(task, num_ranks, python)
        return ranks.run(tool.measure_task, num_ranks, task)[0]

    monkeypatch.setattr(tool, "run_task", run_task)
    tool.main(["--smoke", "--cases", ",".join([*cases, "DeepSpeed 2"]), "--out", str(out)])
    shown = capsys.readouterr().out
    record = json.loads(out.read_text())
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    assert (f"DeepSpeed 2 is left out: {sys.executable} has no package deepspeed" in shown) == (not has_deepspeed)
    assert record["name"] == "ranks"
    assert list(record["samples"]) == ["compute", *cases, *(["DeepSpeed 2"] if has_deepspeed else [])]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    base, case = cases
    assert record["ratios_to_base"][case] == record["median"][case] / record["median"][base]
    assert record["bars"][case] == bar
    payload = record["results"][case]["payload"]
    assert 2 <= payload < num_times + 0.5, "reduced once, gathered once, or for each pass; the rest is padding"
    assert record["results"][base]["payload"] is None
    assert len({each["num_parameters"] for each in record["results"].values()}) == 1, "one model"
    assert all(case in shown for case in cases)


def test_deepspeed_runs_in_another_python(tool: Any, tmp_path: Path) -> None:
    """One that has no such package, nor any other, is asked, and not this one."""
    other, asked = tmp_path / "python", tmp_path / "asked"
    other.write_text(f"#!/bin/sh\necho $PYTHONPATH:$PATH > {asked}\nexit 1\n")
    other.chmod(0o700)
    assert not tool.has_deepspeed(str(other))
    assert asked.read_text().startswith(f":{tmp_path}:"), "its own programs, and not this one's packages"


def test_a_case_that_it_does_not_know_is_refused(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.parse_options(["--cases", "stage 4 device/device"])
    assert "expected some of" in capsys.readouterr().err
