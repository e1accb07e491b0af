"""Gradients of shards that rest on NVMe: every stage that keeps shards has the bits of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.test_parity import assert_equal, reference
from tests.ranks.test_stage3 import TOGETHER
from tests.ranks.training import Case, assert_all_ranks_agree, train_tiered

NVME = {"device": "nvme"}


def on_nvme(case: Case, stage: int, gradients: str = "nvme") -> Case:
    section = {"stage": stage, "offload_optimizer": NVME, "reduce_bucket_size": 4096}
    if stage == 3:
        section |= {"offload_param": {**NVME, "max_in_cpu": 0}, "stage3_max_live_parameters": 0}
    return replace(case, zero=section, runtime={**case.runtime, "gradients": gradients})


@pytest.fixture
def train(ranks: RankPool, swap_path: Path) -> Any:
    def run(case: Case, world: int = 2) -> Sequence[dict[str, Any]]:
        found = ranks.run(train_tiered, world, case, str(swap_path))
        assert_all_ranks_agree(found)
        assert not any(swap_path.iterdir()), "every rank removes its swap directory"
        return found

    return run


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_are_distributed_data_parallel(ranks: RankPool, train: Any, stage: int) -> None:
    """With late transfers, and other times on each rank."""
    case = Case(detours=TOGETHER, delays=True)
    found = train(on_nvme(case, stage))
    assert_equal(found, reference(ranks, Case(detours=TOGETHER)))
    assert all(("nvme", "gradient") in [row[:2] for row in each["plan"]] for each in found)


@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), (3, "fp16")])
def test_accumulation_and_clipping_change_nothing(train: Any, stage: int, precision: str) -> None:
    config: dict[str, Any] = {precision: {"enabled": True}}
    scale = {}
    if precision == "fp16":
        config[precision] |= {"initial_scale_power": 4, "hysteresis": 1}
        scale = {(1, 1): 1e30}
    case = Case(clipping=0.5, detours=TOGETHER, optimizer="groups", accumulation=3, config=config, scale=scale)
    first, found = (train(on_nvme(case, stage, gradients)) for gradients in ("cpu", "nvme"))
    assert_equal(found, first)
    assert str(found[0]["norms"]) == str(first[0]["norms"]) and found[0]["applied"] == first[0]["applied"]
