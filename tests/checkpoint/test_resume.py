"""A run that was stopped and goes on has the bits of the run that was never stopped: weights, masters, state, random
numbers, learning rate, loss scale, counts.

The run that goes on begins with other weights and other random numbers, so that whatever is not restored shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import run_forked
from tests.support.inspection import differences
from tests.support.pairwise import Case, name_of, pairs_of, pairwise
from tests.support.resumed_runs import NUM_STEPS, digests, engine_of, resumed, seen, train, undisturbed

pytestmark = pytest.mark.usefixtures("one_thread")

FACTORS: dict[str, list[Any]] = {
    "params": ["none", "cpu", "nvme"],
    "state": ["none", "cpu", "nvme"],
    "update": ["barrier", "overlapped", "delayed"],
    "form": ["fp32", "bf16", "fp16", "bf16_remainder", "lossy_bf16_moments", "lossy_8bit_moments"],
    "accumulation": [1, 2],
    "changed_groups": [False, True],
    "frozen": [False, True],
    "clipped": [False, True],
}
EXCLUDED = {
    "a delayed update runs off the device": lambda case: case["update"] == "delayed" and case["state"] == "none",
    "halves of a master are updated on one side of the link": lambda case: (
        case["form"] == "bf16_remainder" and (case["params"] == "none") != (case["state"] == "none")
    ),
}
CASES = pairwise(FACTORS, EXCLUDED)


def test_every_two_values_meet() -> None:
    met = set().union(*map(pairs_of, CASES))
    for (left, lefts), (right, rights) in [(a, b) for a in FACTORS.items() for b in FACTORS.items() if a[0] < b[0]]:
        for values in ((x, y) for x in lefts for y in rights):
            pair = (left, values[0], right, values[1])
            impossible = pair in (("state", "none", "update", "delayed"),)
            assert (pair in met) != impossible, pair


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_new_run_goes_on_with_the_same_bits(case: Case, swap_path: Path, tmp_path: Path) -> None:
    expected = undisturbed(case, swap_path)
    with engine_of(case, swap_path) as engine:
        train(engine, case, 0, NUM_STEPS)
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        if case["accumulation"] == 1:
            train(engine, case, NUM_STEPS, 2 * NUM_STEPS)
            assert differences(expected, seen(engine)) == [], "the run that has saved"
    assert differences(expected, resumed(case, swap_path, tmp_path)) == []


IN_NEW_PROCESSES: list[Case] = [
    {"params": "none", "state": "none", "update": "barrier", "form": "bf16"},
    {"params": "cpu", "state": "cpu", "update": "overlapped", "form": "fp16"},
    {"params": "nvme", "state": "nvme", "update": "delayed", "form": "bf16_remainder"},
]


@pytest.mark.parametrize("placement", IN_NEW_PROCESSES, ids=name_of)
def test_a_new_process_goes_on_with_the_same_bits(placement: Case, swap_path: Path, tmp_path: Path) -> None:
    case: Case = {**placement, "accumulation": 2, "changed_groups": True, "frozen": True, "clipped": True}
    with engine_of(case, swap_path) as engine:
        train(engine, case, 0, NUM_STEPS)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    child = run_forked("-m", "tests.checkpoint.run_resumed", json.dumps(case), swap_path, tmp_path)
    assert child.returncode == 0, child.stderr
    expected = digests(undisturbed(case, swap_path))
    found = json.loads(child.stdout)
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []
