"""Gradients of shards that rest on NVMe: every stage that keeps shards has the bits of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.test_parity import assert_equal, reference
from tests.ranks.test_stage3 import TOGETHER
from tests.ranks.training import Case, assert_all_ranks_agree, make_optimizer, rank_and_config, train_tiered
from tests.support.inspection import gradient_traffic
from tests.support.models import ParityGPT, batch

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


def count_gradient_bytes(path: str) -> dict[str, int]:
    """Of the last step() of six micro-batches on this rank, with more units than windows."""
    rank, config = rank_and_config(path, stage=2, reduce_bucket_size=4096)
    config |= {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    config["tiered_zero"]["gradients"] = "nvme"
    torch.manual_seed(3)
    model = ParityGPT(6)
    with tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "adamw"), config=config)[0] as engine:
        for number in range(6):
            engine.backward(engine(*batch(2 * number + rank)))
            before = gradient_traffic(engine)
            engine.step()
        engine.flush()
        return {kind: nbytes - before[kind] for kind, nbytes in gradient_traffic(engine).items()}


def test_squares_are_summed_as_gradients_arrive(ranks: RankPool, swap_path: Path) -> None:
    """In step() the update reads what was written, and nothing is written again, as a window for the norm would be."""
    for moved in ranks.run(count_gradient_bytes, 2, str(swap_path)):
        assert moved["read"] > 0 and not moved["write"], moved
