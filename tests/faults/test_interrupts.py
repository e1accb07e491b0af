"""SIGINT at random times in training programs, which go on and end with the bits of plain PyTorch.

TIERED_ZERO_INTERRUPTS=200 sends signals to so many runs; TIERED_ZERO_INTERRUPTS_SEED draws others.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import ROOT
from tests.faults.run_interrupts import CONFIGS, Case

COUNT = int(os.environ.get("TIERED_ZERO_INTERRUPTS", "16"))
SEED = int(os.environ.get("TIERED_ZERO_INTERRUPTS_SEED", "0"))


def run_cases(swap_path: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """The result of every case, and of a run without signals before the first of each config. Fails where one hangs."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/faults/run_interrupts.py"), str(swap_path)],
        cwd=ROOT,
        input="".join(json.dumps(asdict(case)) + "\n" for case in cases),
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"after {len(results)} results: {done.stderr[-6000:]}"
    return results


@pytest.mark.slow
@pytest.mark.timeout(600 + 10 * COUNT)
def test_a_program_that_is_interrupted_ends_with_the_same_bits(swap_path: Path) -> None:
    """Each config in turn; every fourth signal is followed by a second one, and every fifth run calls the module and
    the loss past the engine."""
    configs = list(CONFIGS)
    cases = [
        Case(
            configs[number * len(configs) // COUNT] if len(configs) < COUNT else configs[number % len(configs)],
            seed=1000 * SEED + number,
            num_signals=2 if number % 4 == 3 else 1,
            past=number % 5 == 4 and "overlapped" not in configs[number * len(configs) // COUNT],
        )
        for number in range(COUNT)
    ]
    results = run_cases(swap_path, cases)
    wrong = [result for result in results if "wrong" in result]
    assert not wrong, "\n".join(f"{one.pop('traceback', '')}\n{json.dumps(one)}" for one in wrong)
    interrupted = [result for result in results if result["where"]]
    print(Counter(result["outcome"] for result in interrupted), f"{len(interrupted)} interrupted")
    assert len(interrupted) >= COUNT // 2
    assert [one for one in interrupted if one["num_signals"] == 1 and one["outcome"] != "went on"] == []
