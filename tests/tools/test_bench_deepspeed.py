"""Our side of the comparison with DeepSpeed runs; its record becomes a table."""

import json
import runpy
from pathlib import Path

from tests.house import ROOT
from tests.support.forked import run_forked


def test_our_side_takes_the_config_of_both(tmp_path: Path) -> None:
    command = [ROOT / "tools" / "bench" / "deepspeed_steps.py", "--case", "tiered_zero/nvme"]
    options = ["--dir", str(tmp_path), "--model", "gpt:layers=2,hidden=64,context=16", "--steps", "2"]
    ran = run_forked(*command, *options)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout.splitlines()[-1])["seconds"]) == 2


def test_a_record_becomes_a_table() -> None:
    record = {
        "machine": {"num_cpus": 2, "cpu": "x"},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        "arguments": {"model": "gpt", "tier": "nvme"},
        "median": {"tiered_zero/nvme": 1.0, "DeepSpeed/nvme": 2.4},
        "deepspeed": {"tiered_zero/nvme": "0.1.0", "DeepSpeed/nvme": "0.19.8"},
        "ratio": 2.4,
    }
    text = runpy.run_path(str(ROOT / "tools" / "benchmark_tables.py"))["deepspeed_table"](record)
    assert "with everything on nvme" in text and "| DeepSpeed/nvme 0.19.8 | 2.40 |" in text and "2.40 times" in text
