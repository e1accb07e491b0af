"""The plan's arithmetic, row by row against formulas written down here, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.peaks import PeakBytes
from tests.support.plan_requests import gradient_tiers, param_tiers
from tests.support.plan_requests import plan_request as request
from tests.support.units import make_unit
from tiered_zero.errors import ConfigError, PlanError
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.planner import Plan, make_plan
from tiered_zero.plan.request import NUM_STATE_STAGING, PlanRequest, SubGroupSize
from tiered_zero.plan.staging import (
    AUTO_STATE_STAGING_NBYTES,
    MAX_AUTO_STAGING_NBYTES,
    NUM_PARAM_STAGING,
    StagingSize,
)
from tiered_zero.rules.rule import Slice
from tiered_zero.rules.torch_rule import TorchRule
from tiered_zero.sizes import MIB, PAGE_NBYTES, TIERS, format_nbytes

K = 8192
"""Elements: whole pages in every dtype here, so that units have no padding but what is written down."""


def some_units(dtype: torch.dtype = torch.bfloat16) -> list[Unit]:
    """[4K] [10K] [6K] [2K, persistent] [3K, frozen] elements."""
    return [
        make_unit(0, [4 * K], dtype),
        make_unit(1, [7 * K, 3 * K], dtype),
        make_unit(2, [6 * K], dtype),
        make_unit(3, [2 * K], dtype, persistent=True),
        make_unit(4, [3 * K], dtype, trainable=False),
    ]


def subgroup(state_nbytes: int, parts: Mapping[int, int], embedding: bool = False) -> SubGroupSize:
    return SubGroupSize(state_nbytes=state_nbytes, parts=parts, embedding=embedding)


def rows(plan: Plan) -> dict[tuple[str, str], int]:
    assert len({(row.tier, row.kind) for row in plan.rows}) == len(plan.rows), "one row a tier and kind"
    return {(row.tier, row.kind): row.nbytes for row in plan.rows}


SIZES = [
    subgroup(40 * PAGE_NBYTES, {0: 4 * K, 1: 7 * K}),
    subgroup(24 * PAGE_NBYTES, {1: 3 * K, 2: 6 * K, 3: 2 * K}),
]


@pytest.mark.parametrize(("param_tier", "optimizer_tier", "sums"), [*itertools.product(TIERS, TIERS, [False, True])])
def test_every_row_of_every_placement(param_tier: str, optimizer_tier: str, sums: bool) -> None:
    plan = make_plan(some_units(), SIZES, request(param_tier, optimizer_tier, sums_gradients=sums))
    state = 64 * PAGE_NBYTES
    gradient_tier = "device" if optimizer_tier == "device" else "host"
    expected = {
        (optimizer_tier, "state"): state,
        (gradient_tier, "gradient"): 22 * K * (4 if sums else 2),
        ("device", "param"): 2 * 25 * K if param_tier == "device" else 2 * 2 * K,
    }
    if param_tier != "device":
        expected["device", "param_window"] = 2 * (10 + 6 + 4) * K  # the largest in use, two more with it
        expected[param_tier, "param"] = 2 * 23 * K
    if param_tier == "nvme":
        expected["host", "staging_param"] = (
            NUM_PARAM_STAGING * MIB
        )  # the largest unit, in whole chunks of the checksums
    if gradient_tier == "host":
        expected["device", "gradient_in_flight"] = 2 * (10 + 6) * K  # of two units
        expected["host", "staging_gradient"] = 2 * 2 * 10 * K  # two of the largest unit
    in_place = "device" if optimizer_tier == "device" else "host"
    out = [11 * K * (param_tier != in_place), 9 * K * (param_tier != in_place) + 2 * K * (in_place != "device")]
    staged = [
        2 * numel + (size.state_nbytes if optimizer_tier == "nvme" else 0)
        for numel, size in zip(out, SIZES, strict=True)
    ]
    count = max(NUM_STATE_STAGING, AUTO_STATE_STAGING_NBYTES // max(*staged, 1))
    expected["host", "staging_state"] = min(sum(map(bool, staged)), count) * max(staged)
    assert rows(plan) == {key: nbytes for key, nbytes in expected.items() if nbytes}
    for tier in TIERS:
        assert plan.nbytes(tier) == sum(nbytes for (where, _), nbytes in expected.items() if where == tier)
    assert plan.tiers.state == [optimizer_tier] * 2
    assert gradient_tiers(plan) == dict.fromkeys(range(4), gradient_tier)
    assert param_tiers(plan) == {
        0: param_tier, 1: param_tier, 2: param_tier, 3: "device", 4: param_tier
    }  # fmt: skip


@pytest.mark.parametrize(
    ("largest", "limit", "count"),
    [
        (2, None, 12),  # small units: the least that keeps a disk busy
        (30, None, 33),  # all of the largest, and one each that is read, updated, written
        (30, 33 * 16 * 14 * MIB, 33),
        (30, 20 * 16 * 14 * MIB, 20),  # no more than a part of the host's memory
        (30, 5 * 16 * 14 * MIB, 12),
        (80, None, 45),  # 640 MiB
    ],
)
def test_a_whole_unit_is_staged_where_there_is_room(largest: int, limit: int | None, count: int) -> None:
    sizes = [4, largest, *[1] * 60]
    units = [make_unit(index, [size * MIB], torch.bfloat16) for index, size in enumerate(sizes)]
    sizes = [subgroup(12 * MIB, {unit.index: MIB}) for unit in units for _ in range(unit.numel // MIB)]
    limits = {} if limit is None else {"host": (limit, "the test")}
    plan = make_plan(units, sizes, request("nvme", "nvme", limits=limits))
    assert plan.staging.state == StagingSize(nbytes=14 * MIB, count=count)


@pytest.mark.parametrize("param_tier", TIERS)
def test_the_delayed_update_keeps_gradients_and_trainable_parameters_twice(param_tier: str) -> None:
    exact, late = (
        rows(make_plan(some_units(), SIZES, request(param_tier, update=update))) for update in ("auto", "delayed")
    )
    back = 20 if param_tier == "nvme" else 22  # what stays on the device gets its second home in host memory
    expected = {**exact, ("host", "gradient"): 2 * exact["host", "gradient"]}
    expected["nvme" if param_tier == "nvme" else "host", "param_back"] = 2 * back * K
    if param_tier == "nvme":
        expected["host", "param_back"] = 2 * 2 * K
    assert late == expected


def test_updates_in_place_need_no_staging() -> None:
    sizes = [subgroup(PAGE_NBYTES, {0: K})]
    assert "staging_state" not in {row.kind for row in make_plan(some_units(), sizes, request()).rows}
    plan = make_plan(some_units(), sizes, request(state_tier="nvme"))
    assert plan.staging.state == StagingSize(nbytes=PAGE_NBYTES, count=1), "one sub-group never needs two buffers"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_buffer_counts_of_the_user_are_honoured(count: int) -> None:
    sizes = [subgroup(PAGE_NBYTES, {0: K})] * 5
    plan = make_plan(some_units(), sizes, request("nvme", "nvme", num_buffers=count))
    assert plan.staging.params.count == count
    assert plan.staging.state.count == min(count, 5)


def test_large_units_are_carried_in_chunks() -> None:
    big = make_unit(0, [40 * MIB], torch.bfloat16)
    chunks = StagingSize(nbytes=MAX_AUTO_STAGING_NBYTES, count=NUM_PARAM_STAGING)
    assert make_plan([big], [], request("nvme")).staging.params == chunks
    assert make_plan([big], [], request("host")).staging.params == StagingSize()


def test_a_buffer_smaller_than_a_parameter_is_refused_with_the_least_size() -> None:
    with pytest.raises(
        ConfigError, match=rf"buffer_size: {7 * K - 1} elements.*u1\.p0 has {7 * K}\. .*at least {7 * K}"
    ):
        make_plan(some_units(), [], request("nvme", param={"buffer_size": 7 * K - 1}))
    nbytes = make_plan(some_units(), [], request("nvme", param={"buffer_size": 7 * K})).staging.params.nbytes
    assert nbytes == 2 * 7 * K, "as the user said, though the unit is larger"
    nbytes = make_plan(some_units(), [], request("nvme", param={"buffer_size": 100 * K})).staging.params.nbytes
    assert nbytes == 2 * 10 * K, "never more than the largest unit"
    make_plan(some_units(), [], request("host", param={"buffer_size": 1}))  # without effect where nothing is staged


# -- state on several tiers --------------------------------------------------------------------------------------------


def spread() -> tuple[list[Unit], list[SubGroupSize]]:
    """Four units of K fp32 elements, the last an embedding, in halves: eight sub-groups of 12 bytes an element."""
    units = [make_unit(index, [K]) for index in range(4)]
    return units, [subgroup(6 * K, {index // 2: K // 2}, index >= 6) for index in range(8)]


def test_fast_tiers_are_filled_with_embeddings_and_then_in_the_order_of_the_forward() -> None:
    units, sizes = spread()
    plan = make_plan(units, sizes, request("host", "nvme", state_limits={"device": 18 * K, "host": 23 * K}))
    assert plan.tiers.state == ["device", *["host"] * 3, *["nvme"] * 2, *["device"] * 2]
    assert gradient_tiers(plan) == {0: "host", 1: "host", 2: "host", 3: "device"}
    found = rows(plan)
    assert [found[tier, "state"] for tier in TIERS] == [18 * K, 18 * K, 12 * K]
    assert [found.get((tier, "gradient"), 0) for tier in TIERS] == [4 * K, 12 * K, 0]
    assert found["host", "staging_state"] == 5 * 6 * K, "a buffer for each that is staged"


@pytest.mark.parametrize("param_tier", TIERS)
def test_what_an_update_cannot_write_in_place_is_staged(param_tier: str) -> None:
    units, sizes = spread()
    plan = make_plan(units, sizes, request(param_tier, "host", state_limits={"device": 6 * K}))
    assert plan.tiers.state == [*["host"] * 6, "device", "host"]
    count = {"device": 7, "host": 1, "nvme": 8}[param_tier]
    assert plan.staging.state == StagingSize(nbytes=2 * K, count=count)


@pytest.mark.parametrize("sums", [False, True])
def test_gradients_that_go_back_to_the_device_are_planned(sums: bool) -> None:
    big = make_unit(0, [8 * K], torch.bfloat16)
    sizes = [subgroup(84 * K, {0: 7 * K}), subgroup(12 * K, {0: K})]
    plan = make_plan([big], sizes, request("host", "host", sums_gradients=sums, state_limits={"device": 84 * K}))
    assert gradient_tiers(plan) == {0: "host"}, "a unit that is split"
    assert plan.in_flight_nbytes == max(16 * K, 7 * K * (4 if sums else 2))


SIZED = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=30)


@given(sized=SIZED, ratio=st.floats(0, 1), last=st.sampled_from(["host", "nvme"]))
def test_the_ratio_is_kept_to_within_one_sub_group(sized: list[tuple[int, bool]], ratio: float, last: str) -> None:
    sizes = [subgroup(PAGE_NBYTES * pages, {}, embedding) for pages, embedding in sized]
    plan = make_plan([], sizes, request("host", last, state={"ratio": ratio}))
    total = sum(size.state_nbytes for size in sizes)
    kept = (1 - ratio) * total
    below = [size.state_nbytes for size, tier in zip(sizes, plan.tiers.state, strict=True) if tier != "device"]
    assert sum(below) >= ratio * total - 1 and (not below or kept - (total - sum(below)) < min(below) + 1)
    assert set(plan.tiers.state) <= {"device", last}
    if ratio == 0:
        assert set(plan.tiers.state) == {"device"}


@given(sized=SIZED, device=st.integers(1, 800), host=st.integers(1, 800), last=st.sampled_from(["host", "nvme"]))
def test_limits_are_never_passed_and_embeddings_are_the_last_to_leave(
    sized: list[tuple[int, bool]], device: int, host: int, last: str
) -> None:
    sizes = [subgroup(pages, {}, embedding) for pages, embedding in sized]
    plan = make_plan([], sizes, request("host", last, state_limits={"device": device, "host": host}))
    held = {tier: plan.nbytes(tier, "state") for tier in TIERS}
    assert held["device"] <= device and (last == "host" or held["host"] <= host)
    assert sum(held.values()) == sum(pages for pages, _ in sized)
    for size, tier in zip(sizes, plan.tiers.state, strict=True):
        if tier != "device":  # nothing that is needed later took its place
            before = [n for n, t in zip(sizes, plan.tiers.state, strict=True) if t == "device" and n.embedding]
            others = [n for n, t in zip(sizes, plan.tiers.state, strict=True) if t == "device" and not n.embedding]
            room = (
                device
                - sum(n.state_nbytes for n in before)
                - (0 if size.embedding else sum(n.state_nbytes for n in others))
            )
            assert size.state_nbytes > room
    if last == "host" and held["host"] > host:
        with pytest.raises(PlanError, match=rf"state_limits.host\), {held['host'] - host} bytes too little"):
            plan.check()
    else:
        plan.check()


def test_the_last_tiers_limit_is_a_bound() -> None:
    units, sizes = spread()
    make_plan(units, sizes, request("host", "nvme", state_limits={"nvme": 48 * K})).check()
    plan = make_plan(units, sizes, request("host", "nvme", state_limits={"nvme": 48 * K - 1}))
    with pytest.raises(PlanError) as caught:
        plan.check()
    assert "on tier nvme" in str(caught.value) and "(tiered_zero.state_limits.nvme), 1 bytes too" in str(caught.value)
    assert plan.text in str(caught.value)


# -- the window --------------------------------------------------------------------------------------------------------


def window(plan: Plan) -> int:
    return plan.nbytes("device", "param_window")


def test_the_window_shrinks_to_the_device_limit_but_not_below_the_unit_in_use() -> None:
    units = some_units()
    fixed = 2 * 2 * K + 2 * 10 * K  # persistent, gradients in flight
    for room in (100 * K, 40 * K, 39 * K, 25 * K, 20 * K):
        plan = make_plan(units, SIZES, request(limits={"device": (fixed + room, "a test")}))
        assert window(plan) == min(2 * 20 * K, room)
        plan.check()
    plan = make_plan(units, SIZES, request(limits={"device": (fixed + 20 * K - 1, "a test")}))
    assert window(plan) == 2 * 10 * K
    with pytest.raises(PlanError):
        plan.check()


def test_max_live_parameters_caps_the_window() -> None:
    assert window(make_plan(some_units(), [], request(zero={"stage3_max_live_parameters": 12 * K}))) == 2 * 12 * K
    assert window(make_plan(some_units(), [], request(zero={"stage3_max_live_parameters": 0}))) == 2 * 10 * K, (
        "0: the unit in use only"
    )
    assert (
        window(make_plan(some_units(), [], request(zero={"stage3_max_live_parameters": 10 * K - 1}))) == 2 * 10 * K
    ), "the unit in use fits"


def test_a_module_inside_a_module_is_in_use_with_it() -> None:
    units = [
        make_unit(0, [K], module=""),
        make_unit(1, [2 * K], module="a"),
        make_unit(2, [3 * K], module="a.b"),
        make_unit(3, [4 * K], module="ab"),  # no relative of "a"
    ]
    assert window(make_plan(units, [], request(zero={"stage3_max_live_parameters": 6 * K - 1}))) == 4 * 6 * K
    assert window(make_plan(units, [], request(zero={"stage3_max_live_parameters": 6 * K}))) == 4 * 6 * K
    assert window(make_plan(units, [], request())) == 4 * 10 * K


# -- host memory for parameters on nvme --------------------------------------------------------------------------------


@given(
    numels=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    room=st.integers(0, 200_000),
)
def test_max_in_cpu_is_kept_to_within_one_unit(numels: list[int], room: int) -> None:
    units = [make_unit(index, [numel], torch.bfloat16) for index, numel in enumerate(numels)]
    tiers = param_tiers(make_plan(units, [], request("nvme", param={"max_in_cpu": room})))
    on_host = sum(numel for index, numel in enumerate(numels) if tiers[index] == "host")
    assert on_host <= room
    left = [numel for index, numel in enumerate(numels) if tiers[index] == "nvme"]
    assert not left or on_host + min(left) > room, "no unit is left on nvme that still had room"
    on_host_alone = make_plan(units, [], request("host", param={"max_in_cpu": room}))
    assert set(param_tiers(on_host_alone).values()) == {"host"}


def test_the_first_units_stay_in_host_memory() -> None:
    units = [make_unit(index, [K]) for index in range(4)]
    plan = make_plan(units, [], request("nvme", param={"max_in_cpu": 2 * K}))
    assert param_tiers(plan) == {0: "host", 1: "host", 2: "nvme", 3: "nvme"}


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_too_small_by_one_byte_is_refused_with_the_table(tier: str) -> None:
    free = make_plan(some_units(), SIZES, request("nvme", "nvme"))
    limit = free.nbytes(tier)
    if tier == "device":
        limit -= window(free) - 2 * 10 * K + 2 * 6 * K  # to which the window and gradients in flight shrink first
    make_plan(some_units(), SIZES, request("nvme", "nvme", limits={tier: (limit, "the source")})).check()
    plan = make_plan(some_units(), SIZES, request("nvme", "nvme", limits={tier: (limit - 1, "the source")}))
    with pytest.raises(PlanError) as caught:
        plan.check()
    text = str(caught.value)
    largest = max((row for row in plan.rows if row.tier == tier), key=lambda row: row.nbytes)
    assert f"The plan needs {format_nbytes(plan.nbytes(tier))} of {tier} memory" in text
    assert f"{format_nbytes(limit - 1)} is allowed (the source)" in text
    assert f"Largest: {largest.what} {format_nbytes(largest.nbytes)}" in text
    for row in plan.rows:
        assert f"{format_nbytes(row.nbytes):>10}  {row.what}" in text, "the whole table"


def test_gradients_of_two_units_are_in_flight_where_an_accelerator_has_room() -> None:
    def in_flight(**fields: Any) -> int:
        return make_plan(some_units(), SIZES, request("host", "host", **fields)).in_flight_nbytes

    device = make_plan(some_units(), SIZES, request("host", "host")).nbytes("device")
    assert in_flight() == in_flight(limits={"device": (device, "")}) == 2 * (10 + 6) * K
    assert in_flight(limits={"device": (device - 1, "")}) == 2 * 10 * K
    assert in_flight(shares_cores=True) == 2 * 10 * K


def test_the_table_sums_up() -> None:
    plan = make_plan(some_units(), SIZES, request("nvme", "nvme", limits={"host": (10**9, "a test")}))
    assert sum(row.nbytes for row in plan.rows) == sum(plan.nbytes(tier) for tier in TIERS)
    assert f"  host: {format_nbytes(plan.nbytes('host'))} of {format_nbytes(10**9)} (a test)" in plan.text
    assert f"  nvme: {format_nbytes(plan.nbytes('nvme'))}\n" in plan.text, "no limit is said where there is none"


# -- more of one never takes less --------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Unit], PlanRequest]:
    units = [
        make_unit(
            index,
            draw(st.lists(st.integers(1, 40_000), min_size=1, max_size=3)),
            torch.bfloat16,
            trainable=draw(st.booleans()),
            persistent=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 6)))
    ]
    return units, request(
        draw(st.sampled_from(TIERS)), draw(st.sampled_from(TIERS)), sums_gradients=draw(st.booleans())
    )


def sizes_of(units: list[Unit]) -> list[SubGroupSize]:
    return [subgroup(12 * unit.numel, {unit.index: unit.numel}) for unit in units if unit.trainable]


@given(run=runs())
def test_a_longer_model_needs_no_less_anywhere(run: tuple[list[Unit], PlanRequest]) -> None:
    units, wished = run
    whole, part = make_plan(units, sizes_of(units), wished), make_plan(units[:-1], sizes_of(units[:-1]), wished)
    for tier in TIERS:
        assert whole.nbytes(tier) >= part.nbytes(tier)


@given(run=runs())
def test_every_byte_of_the_model_rests_on_one_tier(run: tuple[list[Unit], PlanRequest]) -> None:
    units, wished = run
    plan = make_plan(units, sizes_of(units), wished)
    assert sum(plan.nbytes(tier, "param") for tier in TIERS) == sum(unit.nbytes for unit in units)
    assert sum(plan.nbytes(tier, "state") for tier in TIERS) == sum(size.state_nbytes for size in sizes_of(units))
    once = make_plan(units, sizes_of(units), request(wished.param_tier, wished.state_tier))
    assert sum(once.nbytes(tier, "gradient") for tier in TIERS) == sum(unit.nbytes for unit in units if unit.trainable)
    assert all(row.nbytes > 0 for row in plan.rows)


@given(run=runs(), limits=st.lists(st.integers(0, 2_000_000), min_size=2, max_size=2))
def test_a_larger_device_gets_no_smaller_window(run: tuple[list[Unit], PlanRequest], limits: list[int]) -> None:
    units, wished = run
    small, large, free = (
        make_plan(units, sizes_of(units), replace(wished, limits=limit)).pager_limits.live_nbytes
        for limit in (*({"device": (limit, "")} for limit in sorted(limits)), {})
    )
    assert small <= large <= free


@given(run=runs())
def test_offloading_further_takes_nothing_more_of_the_device(run: tuple[list[Unit], PlanRequest]) -> None:
    units, wished = run
    on_host, on_nvme = (
        make_plan(units, sizes_of(units), request(tier, wished.state_tier, sums_gradients=wished.sums_gradients))
        for tier in ("host", "nvme")
    )
    assert on_host.nbytes("device") == on_nvme.nbytes("device")
    assert on_nvme.nbytes("host", "param") == 0


@pytest.mark.parametrize(
    ("limit", "budget", "in_flight"),
    [(MIB, MIB, MIB), (64 * MIB, 64 * MIB, 16 * MIB), (4 << 30, 4 << 30, 256 * MIB), (1 << 40, 1 << 40, 1 << 30)],
)
def test_activations_have_a_budget_and_what_is_on_its_way(limit: int, budget: int, in_flight: int) -> None:
    asked = request("device", "host", activations={"device": "nvme", "nvme_path": "swap", "limit": limit})
    plan = make_plan(some_units(), [], asked)
    assert (plan.nbytes("nvme", "activation"), plan.nbytes("device", "activation_in_flight")) == (budget, in_flight)
    assert plan.nbytes("host", "staging_activation") == 4 * min(in_flight, MAX_AUTO_STAGING_NBYTES)


def test_without_a_limit_activations_take_a_quarter_of_the_host_memory_that_is_left() -> None:
    limits = {"host": (400 * MIB, "here")}
    without = make_plan(some_units(), [], request("host", "host", limits=limits))
    asked = request("host", "host", limits=limits, activations={"device": "cpu"})
    left = 400 * MIB - without.nbytes("host")
    found = make_plan(some_units(), [], asked).nbytes("host", "activation")
    assert found == left // 4 // PAGE_NBYTES * PAGE_NBYTES
    asked = request("host", "host", limits=limits, activations={"device": "cpu", "limit": MIB * 500})
    with pytest.raises(PlanError, match=r"Lower tiered_zero\.activations\.limit"):
        make_plan(some_units(), [], asked).check()


def test_the_window_is_planned_in_the_segments_of_the_devices_allocator() -> None:
    """torch's CUDA allocator lays blocks of 1 to 10 MiB into segments of 20 MiB, larger ones into multiples of 2."""
    for sizes_mib, expected_mib in (([7, 7, 7], 40), ([11, 11, 11], 36), ([12, 7, 0.5], 32.5), ([5, 5, 5, 5], 20)):
        units = [make_unit(index, [int(size * MIB / 2)], torch.bfloat16) for index, size in enumerate(sizes_mib)]
        for segments, window in ((True, expected_mib), (False, sum(sorted(sizes_mib)[-3:]))):
            plan = make_plan(units, [], request(segments=segments))
            assert plan.nbytes("device", "param_window") == window * MIB
            assert plan.pager_limits.live_nbytes == sum(sorted(sizes_mib)[-3:]) * MIB
    limits = {"device": (30 * MIB, "a limit")}
    units = [make_unit(index, [7 * MIB // 2], torch.bfloat16, trainable=False) for index in range(3)]
    plan = make_plan(units, [], request(limits=limits, segments=True))
    assert plan.missing_nbytes("device") <= 0 and plan.pager_limits.live_nbytes < 21 * MIB


RULES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"weight_decay": 0.1, "momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.Adamax, {"weight_decay": 0.1}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_temporaries_of_an_update_on_a_device_are_planned(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """What the first and the second step take beside masters, gradients and state; on meta, which is no CPU."""
    numel = MIB
    hyper = {"lr": 1e-2, "foreach": True, **options}
    rule = TorchRule(optimizer([torch.zeros(1)], **hyper))
    fields = rule.state_fields((numel,), {**rule.defaults})
    with torch.device("meta"):
        run = Slice(
            master=torch.zeros(numel),
            grad=torch.zeros(numel, dtype=torch.bfloat16),
            state={field.name: torch.zeros(numel) for field in fields},
            scalars={},
            hyper=rule.defaults,
        )
    with PeakBytes(run.master, run.grad, *run.state.values()) as peak:
        rule.update([run])
        rule.update([run])
    size = subgroup(4 * numel * (1 + len(fields)), {0: numel})
    asked = request(state_tier="device", temporaries=rule.temporaries)
    plan = make_plan([make_unit(0, [numel], torch.bfloat16)], [size], asked)
    planned = plan.nbytes("device", "update_temporary")
    assert peak.nbytes <= planned + 64 * K and planned <= 2 * peak.nbytes
