"""Ranks against torch's DistributedDataParallel, and stages and tiers against each other, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.training import Case, assert_all_ranks_agree, differences, train_distributed, train_tiered
from tests.support.configs import ADAMW, config_of
from tests.support.models import two_layers

EPSILON = 2.0**-24
"""Half a unit in the last place of fp32: the relative error of one rounding."""

THREE_STEPS = Case(steps=3)
"""Where parameters rest on the device no step follows the schedule of another."""

ACCUMULATING = [(0, "cpu", False), (1, "none", False), (1, "nvme", True), (2, "none", True), (2, "cpu", True)]
"""Stage, tier, and whether each micro-batch is reduced."""

PLACES = [(0, "none"), (0, "nvme"), (1, "cpu"), (2, "nvme")]
"""Of one micro-batch a step: with those of two, above, every stage meets every tier."""


def placed(case: Case, stage: int, device: str, **more: Any) -> Case:
    return replace(case, zero={"stage": stage, "offload_optimizer": {"device": device}}, **more)


@pytest.fixture
def train(ranks: RankPool, swap_path: Path) -> Any:
    def run(case: Case, world: int = 2) -> list[dict[str, Any]]:
        found = ranks.run(train_tiered, world, case, str(swap_path))
        assert_all_ranks_agree(found)
        assert [each["world"] for each in found] == [world] * world
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


@pytest.mark.parametrize(("stage", "device"), PLACES)
def test_two_ranks_are_distributed_data_parallel(ranks: RankPool, train: Any, stage: int, device: str) -> None:
    """With tied and frozen parameters, one that is never used, and one used by some ranks in some steps."""
    found = train(placed(THREE_STEPS, stage, device))
    expected = reference(ranks, THREE_STEPS)
    assert_equal(found, expected)
    for norm, theirs in zip(found[0]["norms"], expected[0]["norms"], strict=True):
        assert norm == pytest.approx(theirs, rel=64 * EPSILON), "torch adds the norms of 30 parameters in fp32"


@pytest.mark.parametrize(
    ("world", "stage", "device", "bucket_numel", "cap"),
    [(3, 0, "cpu", 4096, None), (3, 3, "cpu", 5_000_000, 3000), (4, 2, "nvme", 1000, None), (4, 1, "none", 5_000, 1)],
)
def test_more_ranks_add_in_rank_order(
    ranks: RankPool, train: Any, world: int, stage: int, device: str, bucket_numel: int, cap: int | None
) -> None:
    """However units and buckets are cut: not as gloo's reduce, whose order depends on where an element lies."""
    zero = {"stage": stage, "offload_optimizer": {"device": device}, "reduce_bucket_size": bucket_numel}
    case = Case(steps=3, detours=tuple((1, rank) for rank in range(world)))
    found = train(replace(case, zero=zero, runtime={"unit_size_cap": cap}), world)
    assert_equal(found, reference(ranks, case, world))


@pytest.mark.parametrize(("stage", "device", "reduces_each"), ACCUMULATING)
def test_two_groups_and_accumulation(ranks: RankPool, train: Any, stage: int, device: str, reduces_each: bool) -> None:
    """Whole gradients are reduced once; where each rank keeps its shard, every micro-batch is."""
    case = Case(optimizer="groups", accumulation=2, steps=3, reduces_each=reduces_each)
    assert_equal(train(placed(case, stage, device)), reference(ranks, case))


@pytest.mark.parametrize(("stage", "device"), [(0, "none"), (1, "cpu"), (3, "cpu")])
def test_steps_that_the_caller_decides(train: Any, stage: int, device: str) -> None:
    """With managed_gradient_accumulation false, as with as many micro-batches that the engine counts."""
    case = placed(Case(accumulation=3, steps=2, clipping=0.5, detours=()), stage, device)
    found, expected = train(replace(case, config={"managed_gradient_accumulation": False})), train(case)
    assert_equal(found, expected)
    assert found[0]["norms"] == expected[0]["norms"]


@pytest.mark.parametrize(
    ("optimizer", "places"), [("adafactor", [(1, "none"), (2, "cpu")]), ("muon", [(1, "nvme"), (2, "none")])]
)
def test_rules_of_whole_parameters(ranks: RankPool, train: Any, optimizer: str, places: list[tuple[int, str]]) -> None:
    """Each rank steps parameters of its own: shards are cut between them, and differ in size."""
    case = replace(THREE_STEPS, optimizer=optimizer)
    expected, whole = reference(ranks, case), 0
    for stage, device in ((0, "cpu"), *places):
        found = train(placed(case, stage, device))
        assert_equal(found, expected)
        states = [
            sum(kinds["state"]["peak"] for kinds in rank["memory"].values() if "state" in kinds) for rank in found
        ]
        whole = whole or states[0]
        assert sum(states) == (2 * whole if stage == 0 else whole), "each rank has state of its own parameters alone"


def test_rules_of_whole_parameters_at_four_ranks(train: Any) -> None:
    first: list[dict[str, Any]] | None = None
    for stage, device in ((0, "none"), (1, "cpu"), (2, "nvme")):
        found = train(placed(replace(THREE_STEPS, optimizer="adafactor", clipping=0.5), stage, device), 4)
        first = first or found
        assert_equal(found, first)


def test_stages_and_tiers_are_equal_with_clipping(train: Any) -> None:
    """One order of sums, and one cut of the shards that the norm is added from."""
    case = replace(THREE_STEPS, clipping=0.5)
    first: list[dict[str, Any]] | None = None
    for stage, device in ((0, "none"), (0, "nvme"), (1, "cpu"), (2, "nvme")):
        zero = {"stage": stage, "offload_optimizer": {"device": device}, "reduce_bucket_size": 4096}
        found = train(replace(case, zero=zero), 4)
        first = first or found
        assert_equal(found, first)
        assert found[0]["norms"] == first[0]["norms"]


@pytest.mark.parametrize("world", [1, 4])
def test_one_clipped_step_is_near_distributed_data_parallel(ranks: RankPool, train: Any, world: int) -> None:
    """The norm differs by the roundings of torch's fp32 sums, the averages by those of W - 1 additions."""
    case = Case(optimizer="sgd", clipping=0.5, steps=1)
    expected = reference(ranks, case, world)
    found = train(placed(case, min(1, world - 1), "cpu"), world)
    relative = (64 + 2 * world) * EPSILON
    assert found[0]["norms"][0] == pytest.approx(expected[0]["norms"][0], rel=relative)
    for name, weight in found[0]["weights"].items():
        theirs = expected[0]["weights"][name]
        if weight.is_floating_point():
            step = 0.1 * 0.5  # learning rate times the clipped norm, which bounds every element
            bound = step * relative + 2 * EPSILON * theirs.abs()
            assert ((weight - theirs).abs() <= bound).all(), name


def test_stages_are_equal_in_16_bit(train: Any) -> None:
    """In bf16; in fp16, with its scale, where micro-batches are summed."""
    found = [train(placed(Case(config={"bf16": {"enabled": True}}, steps=3), stage, "cpu")) for stage in (0, 1, 2)]
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    case = Case(config={"fp16": {"enabled": True}}, accumulation=2, steps=3)
    sharded = [train(placed(case, stage, device)) for stage, device in ((1, "cpu"), (2, "nvme"))]
    assert_equal(sharded[0], sharded[1])


def test_an_overflow_on_one_rank_skips_the_step_on_all(train: Any) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    case = Case(config=config, scale={(1, 1): 1e30})
    for stage in (0, 1):
        found = train(placed(case, stage, "cpu"))
        assert [each["applied"] for each in found] == [[True, False, True, True]] * 2
        assert [each["loss_scale"] for each in found] == [8.0, 8.0]


@pytest.mark.parametrize(("stage", "update"), [(0, "overlapped"), (0, "delayed"), (1, "auto")])
def test_late_transfers_change_nothing(ranks: RankPool, train: Any, stage: int, update: str) -> None:
    """Every lane of each rank is late by its own times; the order of collectives, and every bit, stays."""
    runtime = {"update": update, "delay_start_step": 100}
    found = train(placed(THREE_STEPS, stage, "nvme", runtime=runtime, delays=True))
    assert_equal(found, reference(ranks, THREE_STEPS))


def test_state_is_divided_by_the_ranks(train: Any) -> None:
    """At stage 1 the masters and the state of two ranks together are one rank's at stage 0; the rest is whole."""
    peaks = []
    for stage in (0, 1):
        for rank in train(placed(Case(steps=1), stage, "cpu")):
            host = rank["memory"]["host"]
            assert all(kind["peak"] <= kind["planned"] for kind in host.values())
            peaks.append({kind: sizes["peak"] for kind, sizes in host.items()})
    whole, also_whole, first, second = peaks
    assert whole == also_whole
    assert first["state"] + second["state"] == whole["state"]
    assert 0.3 * whole["state"] < second["state"] <= first["state"]
    assert first["bucket"] == whole["bucket"] > 0
    assert first["gradient"] == second["gradient"] == whole["gradient"] // 2


def test_one_rank_has_no_buckets() -> None:
    config = config_of({"stage": 1, "offload_optimizer": {"device": "cpu"}}, optimizer=ADAMW)
    engine, *_ = tiered_zero.initialize(model=two_layers(), config=config)
    with engine:
        assert "bucket" not in {row.kind for row in engine.plan.rows}
