"""Where gradients rest: in host memory as far as that has room, the others on nvme."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.support.inspection.insides import list_params, module_tree
from tests.support.plan_requests import gradient_tiers
from tiered_zero.config.load import load
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.errors import ConfigError, PlanError
from tiered_zero.layout.flat import Unit, find_units
from tiered_zero.layout.subgroups import MAX_SUB_GROUP_NUMEL, cut_subgroups
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.plan.planner import Plan, make_plan
from tiered_zero.plan.request import PlanRequest, SubGroupSize, unit_rules
from tiered_zero.sizes import GIB

NVME = {"device": "nvme", "nvme_path": "swap"}
LARGE = GPTConfig(layers=70, hidden=8960, heads=140, vocab=128256, context=8192, tied=False)
"""70e9 parameters."""


def config_of(accumulation: int = 8, world_size: int = 1, stage: int = 3, **runtime: Any) -> Any:
    return load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "offload_param": NVME, "offload_optimizer": NVME},
            "tiered_zero": runtime,
        },
        world_size=world_size,
        to_train=False,
    )


@cache
def laid_out() -> tuple[list[Unit], list[SubGroupSize]]:
    model = build_gpt(LARGE)
    specs = list_params(model, lambda dtype: torch.bfloat16)
    units = find_units(module_tree(model, specs), list(specs.values()), unit_rules(config_of()))
    group_of = {spec.name: 0 for spec in specs.values()}
    subgroups = cut_subgroups(units, group_of, MAX_SUB_GROUP_NUMEL, elementwise=True)
    return units, [SubGroupSize(state_nbytes=12 * each.numel, parts=each.parts) for each in subgroups]


def planned(host_nbytes: int, **options: Any) -> Plan:
    limits = {"host": (host_nbytes, "--host-memory"), "device": (80 * GIB, "--device-memory")}
    units, sizes = laid_out()
    return make_plan(units, sizes, PlanRequest(config=config_of(**options), limits=limits))


def test_a_model_of_70_billion_fits_64_gib_of_host_memory() -> None:
    """With sums of micro-batches, 4 bytes a parameter, which were 261 GiB of host memory."""
    plan = planned(64 * GIB)
    plan.check()
    rest, all_nbytes = plan.nbytes("nvme", "gradient"), 4 * sum(unit.numel for unit in laid_out()[0])
    assert rest + plan.nbytes("host", "gradient") == all_nbytes > 255 * GIB
    assert plan.nbytes("host", "gradient") > 40 * GIB, "what fits stays in memory"
    with pytest.raises(PlanError, match=r"Set tiered_zero\.gradients to auto"):
        planned(64 * GIB, gradients="cpu").check()
    planned(24 * GIB).check()


def test_ample_memory_keeps_them_and_nvme_can_be_asked_for() -> None:
    assert set(gradient_tiers(planned(512 * GIB)).values()) == {"host"}
    plan = planned(512 * GIB, gradients="nvme", accumulation=1)
    assert set(gradient_tiers(plan).values()) == {"nvme"}
    assert plan.nbytes("nvme", "gradient") == 2 * sum(unit.numel for unit in laid_out()[0])


def test_nvme_is_refused_where_gradients_cannot_rest_there() -> None:
    with pytest.raises(ConfigError, match="device nvme with nvme"):
        load({"train_micro_batch_size_per_gpu": 1, "tiered_zero": {"gradients": "nvme"}})
    with pytest.raises(ConfigError, match="stage 0 with several ranks"):
        PlanRequest(config=config_of(stage=0, world_size=2, gradients="nvme"), world_size=2)
