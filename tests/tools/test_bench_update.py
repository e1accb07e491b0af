"""The update benchmark runs with every case in it, and no benchmark is without such a test."""

from __future__ import annotations

import importlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.lagging.build import why_not
from tests.support.forked import run_forked
from tests.support.native_build import ROOT
from tiered_zero.native.update import supported_levels

CASES = ["triad", "kernel fp32", "small", "small, packed", "whole", "torch", "torch, reuse", "fallback"]


def test_smoke(tmp_path: Path, library: Path) -> None:
    out = tmp_path / "update.jsonl"
    ran = run_forked(ROOT / "tools/bench/update.py", "--smoke", "--out", out)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    levels = [f"kernel {level}" for level in supported_levels(library)]
    assert record["name"] == "update" and set(record["samples"]) == {*CASES, *levels}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    assert set(record["rates_gb_per_s"]) == set(record["samples"]) and record["bound"]["triad_gb_per_s"] > 0


def test_the_benchmark_of_optimizers_runs(swap_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "optimizer.jsonl"
    ran = run_forked(ROOT / "tools/bench/optimizer.py", "--smoke", "--dir", swap_path, "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert not list(swap_path.iterdir()), "nothing is left behind"
    record = json.loads(out.read_text())
    series = {"triad", "disk", "foreach", "fused", "torch ZeRO", "host", "nvme", "ZeRO nvme"}
    assert record["name"] == "optimizer" and set(record["samples"]) == series
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    table = runpy.run_path(str(ROOT / "tools/benchmark_tables.py"))["optimizer_table"](record)
    assert "| nvme |" in table and " of max(disk, triad)" in table


def test_the_benchmark_of_activations_runs(swap_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "activations.jsonl"
    ran = run_forked(ROOT / "tools/bench/activations.py", "--smoke", "--dir", swap_path, "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert not list(swap_path.iterdir()), "nothing is left behind"
    record = json.loads(out.read_text())
    moved = record["moved_nbytes"]
    assert record["name"] == "activations" and moved["nvme"] > 4 * moved["nvme, checkpoints"] > 0
    table = runpy.run_path(str(ROOT / "tools/benchmark_tables.py"))["activations_table"](record)
    assert "| nvme, checkpoints |" in table and " of max(plain, disk)" in table and "CPU, s" in table
    assert min(record["cpu_s"].values()) > 0 and record["arguments"]["huge_pages"] in (False, True)


def test_the_benchmark_of_gradients_runs(swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two processes, of which it measures the memory, are forked."""
    monkeypatch.syspath_prepend(ROOT)
    tool, out = importlib.import_module("tools.bench.gradients"), tmp_path / "gradients.jsonl"

    def run_child(command: list[str]) -> Any:
        ran = run_forked(*command[1:])
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    monkeypatch.setattr(tool, "_run_child", run_child)
    tool.main(["--smoke", "--dir", str(swap_path), "--out", str(out)])
    assert not list(swap_path.iterdir()), "nothing is left behind"
    record = json.loads(out.read_text())
    size = record["sizes"]["smoke"]
    assert record["name"] == "gradients" and size["planned_nbytes"] <= 64 << 20
    forward, backward, update = (size["phases"][name] for name in ("forward", "backward", "update"))
    assert forward["read"] + backward["read"] + update["read"] == size["steps"][0]["read"]
    assert forward["write"] + backward["write"] + update["write"] == size["steps"][0]["write"] > 0
    assert size["bound_s"] > 0 and size["own_nbytes"] > 0


@pytest.mark.skipif(why_not() != "", reason=why_not())
def test_the_benchmark_of_modelled_steps_runs(tmp_path: Path) -> None:
    out = tmp_path / "modelled.jsonl"
    ran = run_forked(ROOT / "tools/bench/modelled.py", "--smoke", "--out", out)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    found = record["results"]["overlapped, clipping 0"]
    assert record["name"] == "modelled" and found["bounds_s"]["compute"] == 0.05 and found["in_backward"]
    assert found["times_bound"] >= 1 and found["copied_nbytes"]["h2d"] > found["copied_nbytes"]["d2h"] > 0


def test_every_benchmark_has_a_smoke_run() -> None:
    found = {path.stem for path in (ROOT / "tools/bench").glob("*.py")}
    known = {"activations", "checkpoint", "gradients", "io", "modelled", "optimizer", "ranks", "step", "update"}
    minutes = {"auto", "deepspeed_steps", "step_seconds"}  # for a machine alone
    assert found - {"bounds", "gpt2", "record"} == known | minutes, "io: tests/io; others: test_bench_*.py here"
