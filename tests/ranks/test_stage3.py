"""Sharded parameters: every stage, tier and policy gives the same bits, and every rank gathers in the same order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.test_parity import assert_equal, reference
from tests.ranks.training import Case, assert_all_ranks_agree, train_tiered

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


@pytest.mark.parametrize(("param", "state"), TIERS)
def test_two_ranks_are_distributed_data_parallel(ranks: RankPool, train: Any, param: str, state: str) -> None:
    case = Case(detours=TOGETHER)
    assert_equal(train(sharded(case, param, state)), reference(ranks, case))


def test_fused_is_stepped_as_unfused(ranks: RankPool, train: Any) -> None:
    """It takes whole parameters, of which each rank has a part; clients ask for it by default."""
    case = Case(detours=TOGETHER, optimizer="fused")
    found = train(sharded(case, "cpu", "cpu"))
    assert_equal(found, reference(ranks, replace(case, optimizer="adamw")))


TOGETHER_4 = tuple((step, rank) for step in (1, 2) for rank in range(4))


@pytest.mark.parametrize("world", [2, 4])
def test_stages_are_equal_with_clipping_groups_and_accumulation(train: Any, world: int) -> None:
    """Buckets are cut alike at every stage, so that sums over ranks have one order."""
    config = {"bf16": {"enabled": True}} if world == 2 else {}
    case = Case(clipping=0.5, detours=TOGETHER_4, optimizer="groups", accumulation=2, steps=3, config=config)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 4096}
    first = train(replace(case, zero=zero), world)
    found = train(sharded(case, "nvme", "cpu", reduce_bucket_size=4096), world)
    assert_equal(found, first)
    assert found[0]["norms"] == first[0]["norms"]


def test_late_transfers_change_nothing(ranks: RankPool, train: Any) -> None:
    """Under the overlapped update, with room for no unit that is not in use."""
    case = Case(detours=TOGETHER, runtime={"update": "overlapped"}, delays=True)
    found = train(sharded(case, "nvme", "nvme", stage3_max_live_parameters=0))
    assert_equal(found, reference(ranks, Case(detours=TOGETHER)))
    assert all("overlapped" in each["policy"] for each in found)


@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
def test_the_delayed_update_is_that_of_whole_parameters(train: Any, param: str) -> None:
    case = Case(detours=TOGETHER, runtime={"update": "delayed", "delay_start_step": 1})
    whole = train(replace(case, zero={"stage": 0, "offload_optimizer": {"device": "cpu"}}))
    found = train(sharded(case, param, "cpu"))
    assert_equal(found, whole)
    assert all("delayed" in each["policy"] for each in found)


@pytest.mark.parametrize(("param", "state", "delayed"), [("none", "none", 0), ("cpu", "cpu", 0), ("none", "cpu", 1)])
def test_bytes_of_a_rank(train: Any, param: str, state: str, delayed: int) -> None:
    """(p + d g + s) / W, with p = g = 2 and s = 12, and a window of whole units."""
    runtime = {"update": "delayed"} if delayed else {}
    case = Case(detours=TOGETHER, steps=2, config={"bf16": {"enabled": True}}, runtime=runtime)
    where = {"none": "device", "cpu": "host"}
    for rank, found in enumerate(train(sharded(case, param, state))):
        numel = sum(numel for trainable, numel, _ in found["units"] if trainable)
        frozen_nbytes = sum(nbytes for trainable, _, nbytes in found["units"] if not trainable)
        num_live = 3 + 1 + 2  # the root's own units, a block, and two that are fetched ahead or kept
        memory = found["memory"]
        params = memory[where[param]]
        assert params["param"]["peak"] == params["param"]["planned"] == 2 * numel // 2 + frozen_nbytes // 2
        assert memory[where[state]]["gradient"]["peak"] == (1 + delayed) * 2 * numel // 2
        state_nbytes = memory[where[state]]["state"]["peak"]
        assert state_nbytes == 12 * numel // 2 if rank == 0 else state_nbytes <= 12 * numel // 2, (
            "less of padding alone"
        )
        assert ("param_back" in params) == bool(delayed)
        if delayed:
            assert params["param_back"]["peak"] == 2 * numel // 2
        window = memory["device"]["param_window"]
        assert 0 < window["peak"] <= window["planned"] <= num_live * max(nbytes for _, _, nbytes in found["units"])
        assert all(kind["peak"] <= kind["planned"] for tier in memory.values() for kind in tier.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_offloaded_activations_add_no_collective(ranks: RankPool, train: Any, swap_path: Path, stage: int) -> None:
    """Also where some find no room."""
    case = Case(detours=TOGETHER, steps=2)
    section = {"device": "nvme", "nvme_path": str(swap_path), "limit": 20_480, "min_nbytes": 64}
    moving = replace(case, runtime={"activations": section})
    found = train(sharded(moving, "nvme", "nvme") if stage == 3 else moving)
    assert_equal(found, reference(ranks, case))
    assert all(each["activations"]["num_moved"] and each["activations"]["num_kept"] for each in found)
