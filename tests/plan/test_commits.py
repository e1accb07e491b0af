"""What in-place commits take on nvme: in the plan, and in each swap directory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.configs import SMALL_DEVICE
from tests.support.inspection.insides import specify_run
from tiered_zero.cli.plan_lines import directory_needs, written_per_commit
from tiered_zero.config.load import load
from tiered_zero.errors import PlanError
from tiered_zero.plan.planner import Plan
from tiered_zero.sizes import PAGE_NBYTES


def config(in_place: bool, params: str = "nvme", states: str = "/a", **settings: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": params, "nvme_path": "/a", "max_in_cpu": 0},
            "offload_optimizer": {"device": "nvme", "nvme_path": states},
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {**SMALL_DEVICE, "device": "cpu", "checkpoint": {"in_place": in_place}, **settings},
    }


class Mixed(nn.Module):
    """A trained layer, a frozen one, and a buffer of 100 floats."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(100))
        self.register_buffer("dropped", torch.zeros(10_000), persistent=False)


def planned(**settings: Any) -> dict[str, int]:
    return nvme_rows(specify_run(load(config(**settings)), Mixed()).plan)


def nvme_rows(plan: Plan) -> dict[str, int]:
    return {row.kind: row.nbytes for row in plan.rows if row.tier == "nvme"}


UNIT = 64 * 65 * 2 + -(64 * 65 * 2) % PAGE_NBYTES
"""Bytes of either layer, bfloat16, in whole pages."""


def test_state_takes_its_bytes_twice_and_frozen_parameters_once() -> None:
    without, within = planned(in_place=False), planned(in_place=True)
    assert within == {**without, "commit": without["state"], "commit_copy": 2 * PAGE_NBYTES}
    assert without == {"param": 2 * UNIT, "state": without["state"]}


def test_frozen_parameters_in_memory_are_copied_once_and_buffers_twice() -> None:
    rows = planned(in_place=True, params="cpu")
    assert rows["commit_copy"] == UNIT + 2 * PAGE_NBYTES
    assert "commit_param" not in rows and "param" not in rows


def test_halves_of_masters_have_two_slots_in_each_of_their_homes() -> None:
    rows = planned(in_place=True, state_format="bf16_remainder")
    assert (rows["param"], rows["commit_param"]) == (2 * UNIT, UNIT)
    rows = planned(in_place=True, state_format="bf16_remainder", update="delayed")
    assert (rows["param"], rows["param_back"], rows["commit_param"]) == (2 * UNIT, UNIT, 2 * UNIT)


def test_halves_of_masters_in_memory_are_copied_to_two_slots() -> None:
    for update in ("auto", "delayed"):
        rows = planned(in_place=True, params="cpu", state_format="bf16_remainder", update=update)
        assert rows["commit_copy"] == (2 + 1) * UNIT + 2 * PAGE_NBYTES
        assert "commit_param" not in rows


@pytest.mark.parametrize("state_format", ["fp32", "bf16_remainder"])
def test_directories_hold_both_slots_and_one_is_written_of_what_is_trained(state_format: str) -> None:
    run = specify_run(load(config(True, states="/b", state_format=state_format)), Mixed())
    rows = nvme_rows(run.plan)
    params, states = directory_needs(run)
    assert params["nbytes"] == rows["param"] + rows.get("commit_param", 0)
    assert states["nbytes"] == rows["state"] + rows["commit"] + rows["commit_copy"]
    written = run.plan.written_nbytes(1, 0)
    assert written == {"param": UNIT, "state": rows["state"], "gradient": 0, "activation": 0}
    assert written_per_commit(run) == PAGE_NBYTES
    written = params["written_nbytes_per_step"], states["written_nbytes_per_step"]
    assert written == (UNIT, rows["state"] + PAGE_NBYTES)


def test_a_limit_of_state_on_nvme_counts_both_slots() -> None:
    rows = planned(in_place=True)
    enough = {"state_limits": {"nvme": 2 * rows["state"]}}
    specify_run(load(config(True, **enough)), Mixed()).plan.check()
    short = {"state_limits": {"nvme": 2 * rows["state"] - 1}}
    with pytest.raises(PlanError, match="1 bytes too little"):
        specify_run(load(config(True, **short)), Mixed()).plan.check()
