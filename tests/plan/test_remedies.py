"""What is said of a plan that does not fit: settings that act on it, and none that does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.test_planner import SIZES, K, rows, some_units, subgroup
from tests.support.plan_requests import plan_request as request
from tests.support.units import make_unit
from tiered_zero.plan.planner import Plan, how_to_fit, make_plan
from tiered_zero.sizes import MIB, ceil_nbytes, parse_nbytes


def planned(param_tier: str, state_tier: str, tier: str, short: int = 1, **fields: Any) -> Plan:
    """A plan that is `short` bytes too large for `tier`."""
    sizes = fields.pop("sizes", SIZES)
    free = make_plan(some_units(), sizes, request(param_tier, state_tier, **fields))
    limits = {tier: (free.nbytes(tier) - short, "tiered_zero.host_memory_limit")}
    return replace(free, request=replace(free.request, limits=limits))


LARGE_STATE = [subgroup(MIB, {0: 4 * K})]
LARGE_PARAMS = [subgroup(K, {})]


@pytest.mark.parametrize(
    ("plan", "tier", "advice"),
    [
        (planned("device", "host", "device"), "device", "Offload parameters (zero_optimization.offload_param"),
        (planned("host", "device", "device"), "device", "Offload the optimizer (zero_optimization.offload_optimizer)"),
        (
            planned("host", "host", "device", state={"ratio": 0.5}),
            "device",
            "Raise zero_optimization.offload_optimizer.ratio",
        ),
        (
            planned("host", "nvme", "device", state_limits={"device": MIB}),
            "device",
            "Lower tiered_zero.state_limits.device",
        ),
        (planned("host", "host", "host", sizes=LARGE_STATE), "host", "Set zero_optimization.offload_optimizer.device"),
        (planned("host", "device", "host"), "host", "Set zero_optimization.offload_param.device to nvme"),
        (
            planned(
                "nvme", "device", "host", sizes=[], num_buffers=1, param={"max_in_cpu": 11 * K, "buffer_size": 9 * K}
            ),
            "host",
            "Lower zero_optimization.offload_param.max_in_cpu",
        ),
        (
            planned("host", "nvme", "host", sizes=LARGE_STATE, state_limits={"host": MIB}),
            "host",
            "Lower tiered_zero.state_limits.host",
        ),
        (
            planned("device", "nvme", "host", sizes=LARGE_STATE * 9, num_buffers=9),
            "host",
            "Set zero_optimization.offload_optimizer.buffer_count to 3",
        ),
        (planned("nvme", "device", "host"), "host", "Lower zero_optimization.offload_param.buffer_count"),
    ],
)
def test_the_setting_that_acts_is_named(plan: Plan, tier: str, advice: str) -> None:
    text = how_to_fit(plan, tier)
    least = f"or raise tiered_zero.host_memory_limit to at least {ceil_nbytes(plan.needed_nbytes(tier))}."
    assert f". {advice}" in text and text.endswith(least), text


def test_a_device_in_host_memory_is_freed_by_its_own_settings() -> None:
    plan = planned("nvme", "nvme", "host", sizes=LARGE_STATE * 4, state_limits={"device": 9 * MIB}, num_buffers=1)
    plan = replace(plan, request=replace(plan.request, device_is_host=True))
    assert ". Lower tiered_zero.state_limits.device" in how_to_fit(plan, "host")


def test_gradients_are_said_to_be_moved_where_state_is_on_nvme() -> None:
    plan = planned("device", "host", "host", sizes=LARGE_PARAMS, num_buffers=1)
    text = how_to_fit(plan, "host")
    assert "Largest: gradients 352.0 KiB, which rest nowhere else; " in text and "gradients to" not in text, text
    text = how_to_fit(planned("device", "nvme", "host", sizes=LARGE_PARAMS, num_buffers=1), "host")
    assert "Largest: gradients 352.0 KiB; " in text and ". Set tiered_zero.gradients to auto; or raise" in text, text
    sums = planned("device", "host", "host", sizes=LARGE_PARAMS, sums_gradients=True)
    assert "Set gradient_accumulation_steps to 1, which needs no fp32 sums" in how_to_fit(sums, "host")
    twice = planned("device", "host", "host", sizes=LARGE_PARAMS, update="delayed")
    assert "Set tiered_zero.update to overlapped, which holds gradients once" in how_to_fit(twice, "host")


def test_buffers_of_state_that_are_as_few_as_can_be_are_said_to_be_fixed() -> None:
    """Sub-groups are cut smaller before a plan is refused, so their size is no remedy."""
    plan = planned("device", "nvme", "host", sizes=LARGE_STATE * 9, num_buffers=3)
    assert "optimizer staging buffers 3.2 MiB, which rest nowhere else" in how_to_fit(plan, "host")


def test_several_settings_are_named_until_they_suffice_and_what_they_lack_is_said() -> None:
    plan = planned("host", "host", "host", short=400 * K, sizes=[subgroup(400 * K, {})])
    assert "nvme and set" not in how_to_fit(plan, "host")
    plan = planned("host", "host", "host", short=402 * K, sizes=[subgroup(400 * K, {})])
    assert (
        "Set zero_optimization.offload_optimizer.device to nvme and set zero_optimization.offload_param.device to nvme"
        in how_to_fit(plan, "host")
    )
    plan = planned("host", "device", "host", short=47 * K, sizes=[])
    least = ceil_nbytes(plan.needed_nbytes("host"))
    assert f"to at least {least}: no other setting frees the 376.0 KiB that are missing." in how_to_fit(plan, "host")


@given(st.integers(0, 1 << 45))
def test_a_limit_that_is_named_is_read_back_as_no_less(nbytes: int) -> None:
    assert nbytes <= parse_nbytes(ceil_nbytes(nbytes)) <= nbytes * 1.1


def test_a_machine_is_named_where_no_setting_limits_it() -> None:
    plan = planned("host", "device", "host")
    limits = {"host": (plan.request.limits["host"][0], "what this machine and its cgroup have free")}
    plan = replace(plan, request=replace(plan.request, limits=limits))
    assert how_to_fit(plan, "host").endswith("or take a machine with more host memory.")


def test_a_unit_of_one_module_is_not_said_to_be_cut() -> None:
    unit = make_unit(0, [9 * K], torch.bfloat16)
    one = make_plan([unit], [], request(limits={"device": (1, "tiered_zero.device_memory_limit")}))
    pager_limits = replace(one.pager_limits, one_module=False)
    assert "Lower tiered_zero.unit_size_cap; or raise" in how_to_fit(replace(one, pager_limits=pager_limits), "device")
    assert how_to_fit(one, "device") == (
        "Largest: paged parameters in use, fetched ahead or kept 144.0 KiB, which rest nowhere else; "
        "gradients on their way to host memory 144.0 KiB, which rest nowhere else. "
        "Raise tiered_zero.device_memory_limit to at least 288.0 KiB: no other setting frees the 288.0 KiB that are "
        "missing."
    )


def test_gradients_of_a_large_model_follow_its_state_to_nvme() -> None:
    """State and parameters alone do not free what is missing: 1,280 KiB of gradients leave 192 KiB of windows."""
    units = [make_unit(index, [4 * K], torch.bfloat16) for index in range(20)]
    sizes = [subgroup(96 * K, {index: 4 * K}) for index in range(20)]
    free = make_plan(units, sizes, request("host", "host"))
    assert (rows(free)["host", "state"], rows(free)["host", "gradient"]) == (20 * 96 * K, 20 * 8 * K)
    for windows, names_settings in ((25 * K, True), (20 * K, False)):
        missing = sum(rows(free)["host", kind] for kind in ("state", "param", "gradient")) - windows
        limits = {"host": (free.nbytes("host") - missing, "tiered_zero.host_memory_limit")}
        text = how_to_fit(replace(free, request=replace(free.request, limits=limits)), "host")
        assert "rest nowhere else" not in text
        state, params = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
        assert (f"Set {state} to nvme and set {params} to nvme; or raise" in text) == names_settings, text
