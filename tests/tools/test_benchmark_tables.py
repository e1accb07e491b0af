"""The documents say what the records say."""

import runpy
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "benchmark_tables.py"


def test_no_figure_differs_from_its_record() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_record_of_ranks_becomes_a_table() -> None:
    result = {"update_policy": "", "payload": None, "waited": None}
    record = {
        "machine": {"num_cpus": 2, "cpu": "x"},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        "arguments": {"model": "gpt2-30m", "ranks": 2, "tokens": 64, "accumulation": 1},
        "median": {"DDP + ZeRO": 0.5, "stage 1 device/device": 0.54},
        "ratios_to_base": {"stage 1 device/device": 1.08},
        "bars": {"stage 1 device/device": 1.1},
        "results": {
            "DDP + ZeRO": result,
            "stage 1 device/device": {"update_policy": "barrier", "payload": 2.01, "waited": 0.25},
        },
    }
    text = runpy.run_path(str(TOOL))["ranks_table"](record)
    assert "A step of gpt2-30m on 2 ranks over gloo, fp32, 64 tokens each" in text
    assert "| DDP + ZeRO | 0.500 |  |  |  |" in text
    assert "| stage 1 device/device barrier | 0.540 | 1.08 (at most 1.10) | 2.01 | 25% |" in text


def test_a_record_of_checkpoints_becomes_a_table() -> None:
    record = {
        "machine": {"num_cpus": 2, "cpu": "x"},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        "median": {"save": 0.25, "torch.save": 2.0, "commit in place": 0.01},
        "full_nbytes": 805306368,
        "ratios_to_fio": {"save": 0.934, "load": None},
        "commit_to_bound": 0.8,
    }
    text = runpy.run_path(str(TOOL))["checkpoint_table"](record)
    assert "Checkpoints of 0.81 GB" in text and "| save | 0.250 | 0.93 of fio's rate |" in text
    assert "| torch.save | 2.000 |  |" in text and "| commit in place | 0.010 | 0.80 of its bound |" in text
