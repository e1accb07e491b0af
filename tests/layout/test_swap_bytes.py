"""The formulas are the plan of the run, to the byte, over random models and configs; and its stripes add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tests.support.swap_configs import configs, shapes
from tiered_zero.cli.capacity import swap_need
from tiered_zero.config import load
from tiered_zero.config.schema import RuntimeSection
from tiered_zero.demo import gpt
from tiered_zero.errors import ConfigError
from tiered_zero.layout.swap_bytes import (
    STATE_ITEMSIZES,
    GPTShape,
    SwapNeed,
    SwapSettings,
    capacity_lines,
    capacity_report,
    count_state_arrays,
    directory_needs,
    file_nbytes,
    gpt_need,
    gpt_of_size,
    parse_gpt,
    size_text,
)
from tiered_zero.plan.planner import Plan
from tiered_zero.run_spec import specify_run
from tiered_zero.sizes import MIB, format_nbytes

ALL_ON_NVME = SwapSettings(2, ("a",), ("a",))


def planned(config: dict[str, Any], shape: GPTShape) -> Plan:
    return specify_run(load(config), gpt.build_gpt(gpt.parse_gpt(str(shape)))).plan


def kinds(plan: Plan) -> SwapNeed:
    return SwapNeed(*(plan.nbytes("nvme", kind) for kind in ("param", "param_back", "state")))


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes(), config=configs())
def test_the_formulas_are_the_plan(shape: GPTShape, config: dict[str, Any]) -> None:
    plan = planned(config, shape)
    need, settings_of = swap_need(load(config), shape)
    assert need == kinds(plan) and need.total == plan.nbytes("nvme")
    assert sum(directory.nbytes for directory in directory_needs(need, settings_of)) == plan.nbytes("nvme")


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
    shape = GPTShape(layers=3, hidden=200, heads=1)
    need, _ = swap_need(load(config), shape)
    assert need == kinds(planned(config, shape))
    assert need.state % 14 == 0 and need.read_a_step == 3 * need.param + need.state


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
    shape = GPTShape(layers, hidden)
    need, _ = swap_need(load(config), shape)
    assert need == kinds(planned(config, shape)) and 0 < need.total < 4 * shape.num_parameters


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
    shape = GPTShape(layers=2, hidden=48, heads=1)
    assert count_state_arrays(name, {}) is not None
    assert swap_need(load(config), shape)[0] == kinds(planned(config, shape))


def test_an_optimizer_without_a_formula_is_planned() -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adafactor"},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a"}},
    }
    shape = GPTShape(layers=2, hidden=64)
    assert count_state_arrays("Adafactor", {}) is None
    need, _ = swap_need(load(config), shape)
    assert need == kinds(planned(config, shape)) and need.state > 4 * shape.num_parameters


# The built-in GPT.


@given(num_wanted=st.floats(1e6, 2e12))
def test_a_size_gives_the_demos_shape(num_wanted: float) -> None:
    shape = gpt_of_size(num_wanted)
    config = gpt.gpt_of_size(num_wanted)
    assert str(shape) == str(config) and shape.num_parameters == gpt.num_parameters(config)


@given(text=st.from_regex(r"(gpt)?:?((layers|hidden|heads|tied|depth)=[0-9x]{1,3},?){0,3}", fullmatch=True))
@example("gpt:layers=2,layers=3")
@example("gpt: hidden = 128 , tied=0")
def test_a_text_gives_the_demos_shape_or_is_refused_by_both(text: str) -> None:
    try:
        config = gpt.parse_gpt(text)
    except ConfigError:
        with pytest.raises(ValueError):
            parse_gpt(text)
    else:
        assert str(parse_gpt(text)) == str(config) and parse_gpt(text).num_parameters == gpt.num_parameters(config)


@pytest.mark.parametrize("size", [0.0, 1e5, float("inf"), float("nan")])
def test_no_size_is_refused(size: float) -> None:
    with pytest.raises(ValueError, match="at least 1e6 parameters"):
        gpt_of_size(size)


# Directories and drives.


@given(params=st.integers(0, 3000), state=st.integers(1, 3000), num=st.integers(1, 7), delayed=st.booleans())
def test_directories_sum_to_the_need_and_to_what_is_written(params: int, state: int, num: int, delayed: bool) -> None:
    page = 4096 * 2 * num
    need = SwapNeed(params * page, params * page if delayed else 0, state * page)
    paths = tuple("abcdefg"[:num])
    for settings_ in (
        replace(ALL_ON_NVME, param_paths=paths, state_paths=paths),
        replace(ALL_ON_NVME, param_paths=paths, state_paths=paths[::-1]),
        replace(ALL_ON_NVME, param_paths=("a",), state_paths=paths),
    ):
        found = directory_needs(need, settings_)
        assert sum(directory.nbytes for directory in found) == need.total
        assert sum(directory.written_a_step for directory in found) == need.written_a_step


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), nbytes=st.integers(0, 3000 * MIB))
def test_stripes_take_the_capacity(weights: list[float], nbytes: int) -> None:
    assert sum(file_nbytes(nbytes, weights)) == nbytes


@given(st.floats(0, 1e16))
def test_sizes_read_as_everywhere(nbytes: float) -> None:
    assume(nbytes >= 0)
    assert size_text(nbytes) == format_nbytes(nbytes)


def test_endurance_is_what_is_written(swap_path: Any) -> None:
    need = gpt_need(GPTShape(), replace(ALL_ON_NVME, param_paths=(str(swap_path),), state_paths=(str(swap_path),)))
    here = replace(ALL_ON_NVME, param_paths=(str(swap_path),), state_paths=(str(swap_path),))
    report = capacity_report("gpt", 1, need, here, tbw=600, step_s=2.0)
    (drive,) = report["drives"]
    assert drive["written_nbytes_per_step"] == need.written_a_step
    assert drive["steps_to_tbw"] == int(600e12) // need.written_a_step
    assert drive["tb_per_day"] == pytest.approx(need.written_a_step * 43200 / 1e12)
    assert drive["days_to_tbw"] == pytest.approx(drive["steps_to_tbw"] / 43200, rel=1e-6)
    assert drive["fits"] and report["fits"]


def test_directories_of_one_file_system_share_its_space(swap_path: Any) -> None:
    paths = tuple(str(swap_path / name) for name in ("a", "b"))
    (swap_path / "a").mkdir()
    need = SwapNeed(state=1 << 60)
    report = capacity_report("gpt", 1, need, SwapSettings(2, (), paths))
    (drive,) = report["drives"]
    assert drive["directories"] == list(paths) and drive["nbytes"] == 1 << 60 and not report["fits"]
    assert [row["exists"] for row in report["directories"]] == [True, False]
    text = "\n".join(capacity_lines(report))
    assert "does NOT fit" in text and "(does not exist yet)" in text


def test_nothing_on_nvme_is_said() -> None:
    report = capacity_report("gpt", 1, SwapNeed(), SwapSettings(2), tbw=1, step_s=1)
    assert report["fits"] and report["drives"] == [] and report["written_nbytes_per_step"] == 0
    assert capacity_lines(report)[-1] == "Nothing rests on NVMe under this config."
