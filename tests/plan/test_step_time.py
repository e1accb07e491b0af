"""Predicted seconds against what they must be by arithmetic, where one lane or two decide them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plan_requests import plan_request
from tests.support.units import make_unit
from tiered_zero.plan.machine import Disk, Machine
from tiered_zero.plan.planner import Plan, make_plan
from tiered_zero.plan.request import SubGroupSize
from tiered_zero.plan.step_time import (
    OTHER_SHARE,
    Work,
    forward_flops,
    missing_rates,
    predict_step,
)

NUM_UNITS, NUMEL = 16, 1 << 20
FAST = 1e18
MACHINE = Machine(
    name="one rate a second",
    device="cuda",
    flops_per_s={"bf16": FAST},
    copy_bytes_per_s=FAST,
    update_bytes_per_s=FAST,
    to_device_bytes_per_s=FAST,
    from_device_bytes_per_s=FAST,
    disks=(Disk(path="", read_bytes_per_s=FAST, write_bytes_per_s=FAST, mixed_bytes_per_s=FAST),),
)


def plan_of(
    state: str = "nvme",
    *,
    clips: bool = False,
    policy: str = "auto",
    num_units: int = NUM_UNITS,
    numel: int = NUMEL,
    **limits: int,
) -> Plan:
    """Plan `num_units` of `numel` elements that stay on the device, with their state elsewhere."""
    units = [make_unit(index, [numel], torch.bfloat16) for index in range(num_units)]
    parts = max(1, min(8, 1024 // num_units))
    sizes = [
        SubGroupSize(state_nbytes=12 * numel // parts, parts={unit.index: numel // parts})
        for unit in units
        for _ in range(parts)
    ]
    return make_plan(
        units,
        sizes,
        plan_request(
            "device", state, update=policy, clips=clips, state_limits={tier: n for tier, n in limits.items() if n}
        ),
    )


def changed(plan: Plan, **fields: Any) -> Plan:
    """Change fields of every unit's placement."""
    units = tuple(replace(placed, **fields) for placed in plan.tiers.units)
    return replace(plan, tiers=replace(plan.tiers, units=units))


def work(plan: Plan, **fields: Any) -> Work:
    return Work(tokens=100, forward_flops=forward_flops(plan.tiers.units, 100), **fields)


def machine(plan: Plan, *, compute_s: float = 0.0, disk_s: float = 0.0, update_s: float = 0.0) -> Machine:
    """Return a machine on which the lanes are busy for so many thousand seconds in a step of one micro-batch: beside
    them what each sub-group costs by itself is nothing."""
    compute_s, disk_s, update_s = 1e3 * compute_s, 1e3 * disk_s, 1e3 * update_s
    found = MACHINE
    if compute_s:
        found = replace(found, flops_per_s={"bf16": 3 * work(plan).forward_flops / compute_s / OTHER_SHARE})
    if disk_s:
        rate = 2 * plan.nbytes("nvme", "state") / disk_s
        disk = Disk(path="", read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=rate)
        found = replace(found, disks=(disk,))
    if update_s:
        found = replace(found, update_bytes_per_s=28 * NUM_UNITS * NUMEL / update_s)
    return found


def seconds(plan: Plan, accumulation: int = 1, **lanes: float) -> float:
    return predict_step(plan, work(plan, accumulation=accumulation), machine(plan, **lanes)).seconds / 1e3


@pytest.mark.parametrize("state", ["device", "host", "nvme"])
def test_compute_alone_takes_three_forwards_a_micro_batch(state: str) -> None:
    plan = plan_of(state)
    assert seconds(plan, compute_s=2.0) == pytest.approx(2.0, rel=1e-3)
    assert seconds(plan, 7, compute_s=2.0) == pytest.approx(14.0, rel=1e-3)
    recomputed = predict_step(plan, work(plan, recomputes=True), machine(plan, compute_s=3.0))
    assert recomputed.seconds == pytest.approx(4000.0, rel=1e-3)


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    plan = plan_of("device")
    units = plan.tiers.units
    frozen = [replace(placed, gradient_tier="", gradient_nbytes=0, state={}) for placed in units[: NUM_UNITS // 2]]
    half = replace(plan, tiers=replace(plan.tiers, units=(*frozen, *units[NUM_UNITS // 2 :])))
    assert seconds(half, compute_s=3.0) == pytest.approx(2.5, rel=1e-3)


def test_gradients_on_nvme_are_read_by_the_next_micro_batch_and_the_update() -> None:
    plan, nbytes, rate = plan_of(clips=True), 4 * NUMEL, 1e6
    plan = changed(plan, gradient_tier="nvme", gradient_nbytes=nbytes)
    disk = Disk(path="", read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=rate)
    step = predict_step(plan, work(plan, accumulation=4), replace(MACHINE, disks=(disk,)), finds_hidden=False)
    expected = plan.nbytes("nvme", "state") + 4 * nbytes * NUM_UNITS
    assert step.by_resource["disk read"] * rate == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("clips", [False, True])
def test_the_disk_alone_takes_its_bytes_at_its_rate(clips: bool) -> None:
    assert seconds(plan_of(clips=clips), disk_s=2.0) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("compute_s", [0.2, 0.5, 1.0, 2.0, 5.0])
def test_without_a_norm_a_step_takes_its_slowest_lane(compute_s: float) -> None:
    found = seconds(plan_of(), compute_s=compute_s, disk_s=1.0)
    assert max(1.0, compute_s) <= found * 1.0001 and found < 1.12 * max(1.0, compute_s)


@pytest.mark.parametrize("update_s", [0.1, 0.5, 2.0])
def test_behind_a_norm_forward_follows_the_update_unit_by_unit(update_s: float) -> None:
    plan = plan_of("host", clips=True)
    forward_s, backward_s = 1.0, 2.0
    slower, faster = max(update_s, forward_s), min(update_s, forward_s)
    expected = slower + faster / NUM_UNITS + backward_s
    assert seconds(plan, compute_s=3.0, update_s=update_s) == pytest.approx(expected, rel=1e-3)


def test_a_barrier_adds_update_and_compute() -> None:
    assert seconds(plan_of("host", policy="barrier"), compute_s=3.0, update_s=2.0) == pytest.approx(5.0, rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(host=st.integers(0, NUM_UNITS * 8), clips=st.booleans(), compute_s=st.sampled_from([0.1, 0.7, 1.5]))
def test_more_memory_for_state_never_makes_a_step_longer(host: int, clips: bool, compute_s: float) -> None:
    piece = 12 * NUMEL // 8
    less, more = (plan_of(clips=clips, host=piece * number) for number in (host // 2, host))
    rates = machine(plan_of(), compute_s=compute_s, disk_s=1.0)
    work_of = work(less)
    assert predict_step(more, work_of, rates).seconds <= 1.02 * predict_step(less, work_of, rates).seconds


def test_a_tier_is_hidden_from_the_tokens_that_make_compute_as_long() -> None:
    eager, clipped, barrier = plan_of(), plan_of(clips=True), plan_of(policy="barrier")
    rates = machine(eager, compute_s=0.5, disk_s=1.0)
    at_once = predict_step(eager, work(eager), rates).hidden_from_tokens["nvme"]
    behind = predict_step(clipped, work(clipped), rates).hidden_from_tokens["nvme"]
    assert at_once is not None and behind is not None
    assert 195 <= at_once < behind <= 3.5 * 200, "forward alone, a third of compute, hides what follows a norm"
    never = predict_step(barrier, work(barrier), rates)
    assert never.hidden_from_tokens["nvme"] is None and never.searched_tokens["nvme"] > 8 * 195


def test_the_update_of_state_counts_for_the_tier_that_has_it() -> None:
    """State on nvme: what host memory adds is the gradients' copy, and the update is nvme's."""
    plan = plan_of(clips=True, policy="barrier")
    rates = replace(machine(plan, compute_s=1.0, update_s=1.0), from_device_bytes_per_s=2 * NUM_UNITS * NUMEL / 300)
    hidden = predict_step(plan, work(plan), rates).hidden_from_tokens
    assert hidden["nvme"] is None and hidden["host"] is not None


def test_a_disk_that_is_slow_both_ways_reads_alone_at_its_rate() -> None:
    plan = changed(plan_of("device"), param_tier="nvme", param_nbytes=2 * NUMEL, is_resident=False)
    disk = Disk(path="", read_bytes_per_s=1e6, write_bytes_per_s=1e6, mixed_bytes_per_s=0.5e6)
    step = predict_step(plan, work(plan), replace(MACHINE, disks=(disk,)), finds_hidden=False)
    assert step.seconds == pytest.approx(step.by_resource["disk read"], rel=1e-3)


def test_what_a_model_computes_besides_products_adds_to_them() -> None:
    plan = plan_of()
    flops = {"bf16": 3 * work(plan).forward_flops}
    measured = replace(MACHINE, flops_per_s=flops, block_elements_per_s={"bf16": 100.0}, logits_per_s={"bf16": 400.0})
    known = work(plan, num_block_elements=200, num_logits=400)
    assert predict_step(plan, known, measured).by_resource["compute"] == pytest.approx(1 + 2 + 1)
    for shape, machine in ((work(plan), measured), (known, replace(MACHINE, flops_per_s=flops))):
        assert predict_step(plan, shape, machine).by_resource["compute"] == pytest.approx(1 / OTHER_SHARE)


def test_rates_that_are_not_known_are_named() -> None:
    plan = plan_of()
    nothing = Machine(name="", device="cuda")
    assert missing_rates(plan, work(plan), MACHINE) == []
    assert "flops_per_s.bf16" in missing_rates(plan, work(plan), nothing)
    assert "disks" in missing_rates(plan, work(plan), nothing)
    assert "disks" not in missing_rates(plan_of("host"), work(plan), nothing)
