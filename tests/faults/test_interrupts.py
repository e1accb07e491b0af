"""A call that is interrupted at any line costs its step, or latches the engine; it never hangs, and nothing is left.

TIERED_ZERO_INTERRUPTS=40 draws so many lines of each call in every config; =each takes every line, once (0.3 s a line,
40 minutes a config: choose with -k "nvme and load_checkpoint"); =all takes every line, each time that it is executed
(hours a call); =calls takes every place behind a call of a C function, whose result an interrupt loses.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import ROOT
from tests.faults.run_interrupts import CALLS, CONFIGS, Batch, begins_in_backward

LONG = os.environ.get("TIERED_ZERO_INTERRUPTS", "")
KINDS = ("interrupt", "interrupt", "memory")
SAMPLE = (
    "forward",
    "backward",
    "step",
    "gathered",
    "modify",
    "state_dict",
    "save_checkpoint",
    "load_checkpoint",
    "close",
)


def run_batches(swap_path: Path, batches: list[Batch]) -> list[dict[str, Any]]:
    """The result of every case, and of an uninterrupted call before those of each batch. Fails where one hangs."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/faults/run_interrupts.py"), str(swap_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="".join(json.dumps(asdict(batch)) + "\n" for batch in batches),
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"after {len(results)} cases of {batches}: {done.stderr[-6000:]}"
    return results


def check(results: list[dict[str, Any]]) -> None:
    wrong = [result for result in results if "wrong" in result]
    assert not wrong, "\n".join(map(json.dumps, wrong))
    assert any(result["where"] for result in results), "nothing was interrupted"


LONG_CASES = [
    (config, call)
    for config in CONFIGS
    for call in CALLS
    if not (begins_in_backward(config) and call in ("zero_grad", "abort_step"))  # such a step cannot be given up
]

if LONG:

    @pytest.mark.timeout(36_000)
    @pytest.mark.parametrize(("config", "call"), LONG_CASES)
    def test_all_calls(config: str, call: str, swap_path: Path) -> None:
        count = 0 if LONG in ("each", "all", "calls") else int(LONG)
        batch = Batch(config, call, count, every_time=LONG == "all", kinds=KINDS, at_calls=LONG == "calls")
        check(run_batches(swap_path, [batch]))

else:

    @pytest.mark.timeout(1200)
    def test_a_sample_of_lines(swap_path: Path) -> None:
        """In one process: to start it takes longer than to run a config."""
        drawn = [(config, call) for config in CONFIGS for call in random.Random(config).sample(SAMPLE, 3)]
        results = run_batches(swap_path, [Batch(config, call, 2, kinds=KINDS) for config, call in drawn])
        for config in CONFIGS:
            own = [result for result in results if result["config"] == config]
            assert len(own) == 3 * (1 + 2)
            check(own)
