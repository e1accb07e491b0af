"""Sharded parameters: every stage, tier and policy gives the same bits, and every rank gathers in the same order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.training import Case, assert_all_ranks_agree, differences, train_distributed, train_tiered

TOGETHER = ((1, 0), (1, 1), (2, 0), (2, 1))
"""At stage 3 every rank uses the same modules."""

TIERS = [("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("cpu", "none"), ("nvme", "nvme"), ("nvme", "cpu")]


def sharded(case: Case, param: str, state: str, **zero: Any) -> Case:
    section = {"stage": 3, "offload_param": {"device": param, "max_in_cpu": 0}, "offload_optimizer": {"device": state}}
    return replace(case, zero={**section, **zero})


@pytest.fixture
def train(ranks: RankPool, swap_path: Path) -> Any:
    def run(case: Case, world: int = 2) -> list[dict[str, Any]]:
        found = ranks.run(train_tiered, world, case, str(swap_path))
        assert_all_ranks_agree(found)
        assert not any(swap_path.iterdir()), "every rank removes its swap directory"
        return found

    return run


_references: dict[Any, list[dict[str, Any]]] = {}


def reference(ranks: RankPool, case: Case, world: int = 2) -> list[dict[str, Any]]:
    key = (repr(case), world)
    if key not in _references:
        _references[key] = ranks.run(train_distributed, world, case)
    return _references[key]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert differences(found[0]["weights"], expected[0]["weights"]) == []
    assert [each["losses"] for each in found] == [each["losses"] for each in expected]


@pytest.mark.parametrize(("param", "state"), TIERS)
def test_two_ranks_are_distributed_data_parallel(ranks: RankPool, train: Any, param: str, state: str) -> None:
    case = Case(detours=TOGETHER)
    assert_equal(train(sharded(case, param, state)), reference(ranks, case))
