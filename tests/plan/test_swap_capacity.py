"""A plan from the shape of a GPT is the plan of the run, to the byte, over random models and configs; and what is said
of directories and drives adds up.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.swap_configs import configs, shapes
from tiered_zero.assembly.run_spec import specify_run
from tiered_zero.cli.capacity import swap_need
from tiered_zero.config import load
from tiered_zero.config.schema import RuntimeSection, ZeroSection
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.errors import ConfigError
from tiered_zero.layout.extents import file_nbytes
from tiered_zero.params.model_spec import list_params, module_tree
from tiered_zero.plan.gpt_shape import GPTConfig, describe_gpt, num_parameters
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.swap_capacity import (
    STATE_ITEMSIZES,
    SwapNeed,
    capacity_lines,
    capacity_report,
    directory_needs,
    plan_gpt,
    state_arrays,
)
from tiered_zero.sizes import MIB


def planned(config: dict[str, Any], shape: GPTConfig) -> Plan:
    return specify_run(load(config), build_gpt(shape)).plan


def on_nvme(param_paths: tuple[str, ...], state_paths: tuple[str, ...]) -> ZeroSection:
    param, state = ({"device": "nvme", "nvme_path": paths} for paths in (param_paths, state_paths))
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "offload_param": param, "offload_optimizer": state},
    }
    return load(config).zero_optimization


@given(shape=shapes())
def test_the_shape_describes_the_model(shape: GPTConfig) -> None:
    model = build_gpt(shape)
    specs = list_params(model, lambda dtype: dtype)
    assert describe_gpt(shape, torch.float32) == (module_tree(model, specs), list(specs.values()))
    assert num_parameters(shape) == sum(spec.numel for spec in specs.values())


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes(), config=configs())
def test_the_plan_of_a_shape_is_the_plan_of_the_run(shape: GPTConfig, config: dict[str, Any]) -> None:
    run, loaded = planned(config, shape), load(config)
    plan = plan_gpt(loaded, shape)
    assert plan.tiers.params == run.tiers.params and plan.tiers.gradients == run.tiers.gradients
    assert set(plan.tiers.state) == set(run.tiers.state) and plan.staging.params == run.staging.params
    assert [row for row in plan.rows if row.kind == "state"] == [row for row in run.rows if row.kind == "state"]
    need = SwapNeed.of(plan)
    assert need == SwapNeed.of(run) and need.total == run.nbytes("nvme")
    directories = directory_needs(need, loaded.zero_optimization, 1, loaded.tiered_zero.activations.nvme_paths)
    assert sum(directory.nbytes for directory in directories) == run.nbytes("nvme")


def test_every_state_format_has_a_formula() -> None:
    assert get_args(RuntimeSection.model_fields["state_format"].annotation) == tuple(STATE_ITEMSIZES)


@pytest.mark.parametrize("param", ["cpu", "nvme"])
@pytest.mark.parametrize("update", ["overlapped", "delayed"])
def test_the_formula_of_remainders(param: str, update: str) -> None:
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"amsgrad": True}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": "a", "max_in_cpu": 0},
            "offload_optimizer": {"device": "nvme", "nvme_path": "b"},
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"state_format": "bf16_remainder", "update": update},
    }
    shape = GPTConfig(layers=3, hidden=200, heads=1)
    need = swap_need(load(config), shape)
    assert need == SwapNeed.of(planned(config, shape))
    assert need.state % 14 == 0 and need.read_per_step == 3 * need.param + need.state


@pytest.mark.parametrize(("layers", "hidden"), [(1, 8192), (2, 16384)])
def test_units_past_the_largest_size_are_cut_as_the_walk_cuts_them(layers: int, hidden: int) -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "a", "max_in_cpu": 7e8},
            "stage3_max_live_parameters": 2e9,
        },
    }
    shape = GPTConfig(layers=layers, hidden=hidden)
    need = swap_need(load(config), shape)
    assert need == SwapNeed.of(planned(config, shape)) and 0 < need.total < 4 * num_parameters(shape)


OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "RMSprop": {"momentum": "0.9", "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "fused": True},
    "Lion": {},
}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_state_of_every_optimizer(name: str, bare: bool) -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": name, "params": {} if bare else OPTIONS[name]},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a"}},
    }
    shape = GPTConfig(layers=2, hidden=48, heads=1)
    assert state_arrays(load(config)) is not None
    assert swap_need(load(config), shape) == SwapNeed.of(planned(config, shape))


def test_an_optimizer_without_a_formula_is_planned() -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adafactor"},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a"}},
    }
    shape = GPTConfig(layers=2, hidden=64)
    assert state_arrays(load(config)) is None
    with pytest.raises(ConfigError, match="'Adafactor' is not known here"):
        plan_gpt(load(config), shape)
    need = swap_need(load(config), shape)
    assert need == SwapNeed.of(planned(config, shape)) and need.state > 4 * num_parameters(shape)


# Directories and drives.


@given(params=st.integers(0, 3000), state=st.integers(1, 3000), num=st.integers(1, 7), delayed=st.booleans())
def test_directories_sum_to_the_need_and_to_what_is_written(params: int, state: int, num: int, delayed: bool) -> None:
    page = 4096 * 2 * num
    need = SwapNeed(param=params * page, param_back=params * page if delayed else 0, state=state * page)
    paths = tuple("abcdefg"[:num])
    for zero in (on_nvme(paths, paths), on_nvme(paths, paths[::-1]), on_nvme(("a",), paths)):
        found = directory_needs(need, zero)
        assert sum(directory.nbytes for directory in found) == need.total
        assert sum(directory.written_per_step for directory in found) == need.written_per_step


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), nbytes=st.integers(0, 3000 * MIB))
def test_stripes_take_the_capacity(weights: list[float], nbytes: int) -> None:
    assert sum(file_nbytes(nbytes, weights)) == nbytes


def swap_config(param_paths: list[str], state_paths: list[str]) -> dict[str, Any]:
    param, state = (
        {"device": "nvme", "nvme_path": paths} if paths else {"device": "none"} for paths in (param_paths, state_paths)
    )
    zero = {"stage": 3, "offload_param": param, "offload_optimizer": state}
    return {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero}


def test_endurance_is_what_is_written(swap_path: Any) -> None:
    config = load(swap_config([str(swap_path)], [str(swap_path)]))
    need = swap_need(config, GPTConfig())
    report = capacity_report(config, GPTConfig(), need, tbw=600, step_s=2.0)
    (drive,) = report["drives"]
    assert drive["written_nbytes_per_step"] == need.written_per_step
    assert drive["steps_to_tbw"] == int(600e12) // need.written_per_step
    assert drive["tb_per_day"] == pytest.approx(need.written_per_step * 43200 / 1e12)
    assert drive["days_to_tbw"] == pytest.approx(drive["steps_to_tbw"] / 43200, rel=1e-6)
    assert drive["fits"] and report["fits"]


def test_copies_of_commits_wear_the_drive(swap_path: Any) -> None:
    """Halves of masters in host memory: 2 bytes a parameter at each commit, to one of two places."""
    settings = swap_config([], [str(swap_path)])
    settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    settings |= {"bf16": {"enabled": True}}
    settings["tiered_zero"] = {"checkpoint": {"in_place": True}, "state_format": "bf16_remainder"}
    config = load(settings)
    need = swap_need(config, GPTConfig())
    assert need.written_per_commit == need.commit_copy // 2 >= 2 * num_parameters(GPTConfig())
    for every in (1, 4):
        report = capacity_report(config, GPTConfig(), need, tbw=600, save_every=every)
        (drive,) = report["drives"]
        assert 0 <= drive["written_nbytes_per_step"] - need.state - need.written_per_commit / every < 4096
        assert drive["steps_to_tbw"] == int(600e12) // drive["written_nbytes_per_step"]
        often = "each step" if every == 1 else "every 4 steps"
        assert any("per commit" in line and often in line for line in capacity_lines(report))


def test_directories_of_one_file_system_share_its_space(swap_path: Any) -> None:
    paths = [str(swap_path / name) for name in ("a", "b")]
    (swap_path / "a").mkdir()
    report = capacity_report(load(swap_config([], paths)), GPTConfig(), SwapNeed(state=1 << 60))
    (drive,) = report["drives"]
    assert drive["directories"] == paths and drive["nbytes"] == 1 << 60 and not report["fits"]
    assert [row["exists"] for row in report["directories"]] == [True, False]
    text = "\n".join(capacity_lines(report))
    assert "does NOT fit" in text and "(does not exist yet)" in text


def test_nothing_on_nvme_is_said() -> None:
    report = capacity_report(load(swap_config([], [])), GPTConfig(), SwapNeed(), tbw=1, step_s=1)
    assert report["fits"] and report["drives"] == [] and report["written_nbytes_per_step"] == 0
    assert capacity_lines(report)[-1] == "Nothing rests on NVMe under this config."
