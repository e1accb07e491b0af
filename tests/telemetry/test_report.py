"""Causes sum to the wall time; the bottleneck follows a delay; a run's typical step is a step."""

from __future__ import annotations

import math

import pytest

from tests.telemetry.conftest import Clock
from tiered_zero.errors import StoreError
from tiered_zero.telemetry import report as report_module
from tiered_zero.telemetry.report import (
    RunReport,
    RunTotals,
    StepMeter,
    StepReport,
    bottleneck,
    build_step_report,
    middle_half,
    overlap_fraction,
)
from tiered_zero.telemetry.spans import LANES, Ledger, Recorder, Totals


def make_step(step: int = 1, wall_s: float = 1.0, **facts) -> StepReport:  # type: ignore[no-untyped-def]
    seconds = {"forward": 0.3 * wall_s, "wait_param": 0.5 * wall_s, "other": 0.2 * wall_s}
    return StepReport(step=step, wall_s=wall_s, seconds=seconds, busy_s={"compute": 0.5 * wall_s}, **facts)


def run_step(clock: Clock, recorder: Recorder, delays: dict[str, float]) -> StepReport:
    """A step in which each lane works for 10 ms, or for its delay; all but compute at the same time."""
    began_s = clock.perf_counter()
    with recorder.span("compute", "forward"):
        clock.sleep(delays.get("compute", 0.01))
        start_s = clock.perf_counter()
        others = {lane: delays.get(lane, 0.01) for lane in LANES if lane != "compute"}
        with recorder.span("compute", "wait_param"):
            clock.sleep(max(others.values()))
        for lane, worked_s in others.items():
            recorder.add(lane, "work", "", start_s, start_s + worked_s, nbytes=100)
    return build_step_report(1, recorder.take_totals(), clock.perf_counter() - began_s)


@pytest.mark.parametrize("slow", LANES)
def test_a_delay_in_one_resource_moves_the_bottleneck_to_it(slow: str, clock: Clock) -> None:
    report = run_step(clock, Recorder(), {slow: 0.06})
    assert report.bound_by.startswith(f"{slow} (")
    assert report.bound_by.endswith("% busy)")


def test_causes_sum_to_the_wall_time(clock: Clock) -> None:
    recorder = Recorder()
    began_s = clock.perf_counter()
    for kind in ("forward", "backward", "step"):
        with recorder.span("compute", kind):
            clock.sleep(0.01)
            with recorder.span("compute", "wait_param"):
                clock.sleep(0.01)
    clock.sleep(0.02)
    report = build_step_report(3, recorder.take_totals(), clock.perf_counter() - began_s)
    assert set(report.seconds) == {"forward", "backward", "step", "wait_param", "other"}
    assert sum(report.seconds.values()) == pytest.approx(report.wall_s, rel=1e-6)
    assert report.seconds["other"] == pytest.approx(0.02)


def test_work_of_other_lanes_is_no_cause(clock: Clock) -> None:
    recorder = Recorder()
    with recorder.span("compute", "step"):
        clock.sleep(1.0)
    recorder.add("update", "update", "", 0.0, 0.9)
    seconds = build_step_report(1, recorder.take_totals(), 2.0).seconds
    assert seconds == pytest.approx({"step": 1.0, "other": 1.0})


def test_memory_comes_from_the_ledger() -> None:
    ledger = Ledger()
    ledger.charge("host", "arena", 30)
    ledger.charge("host", "staging", 12)
    ledger.discharge("host", "staging", 10)
    report = build_step_report(1, Totals(), 1.0, ledger)
    assert report.tier_nbytes == report.peak_nbytes == {"host": 42}
    assert report.kind_nbytes == {"host": {"arena": 30, "staging": 12}}
    again = build_step_report(2, Totals(), 1.0, ledger)
    assert again.tier_nbytes == {"host": 32} and again.peak_nbytes == {"host": 42}


def test_rates_are_bytes_over_busy_time_and_need_one() -> None:
    report = StepReport(
        step=1,
        wall_s=2.0,
        seconds={},
        link_nbytes={"disk read": 100, "fetch": 5},
        busy_s={"disk read": 0.5, "fetch": 0.0},
    )
    assert report.bytes_per_s == {"disk read": 200.0}


@pytest.mark.parametrize(
    ("busy", "wall_s", "expected"),
    [
        ({"compute": 1.0, "disk read": 1.0}, 2.0, 0.0),
        ({"compute": 1.0, "disk read": 1.0}, 1.0, 1.0),
        ({"compute": 1.0, "disk read": 1.0}, 1.5, 0.5),
        ({"compute": 1.0, "disk read": 1.0}, 9.0, 0.0),
        ({"compute": 1.0}, 1.0, 0.0),
        ({}, 1.0, 0.0),
    ],
)
def test_overlap_lies_between_one_after_the_other_and_the_busiest_alone(busy, wall_s, expected) -> None:  # type: ignore[no-untyped-def]
    assert overlap_fraction(busy, wall_s) == pytest.approx(expected)


def test_nothing_measured_is_said() -> None:
    assert bottleneck({}, 1.0) == "nothing measured"
    assert bottleneck({"disk write": 1.4}, 1.0) == "disk write (100% busy)"


def test_a_report_survives_json_even_with_a_loss_that_is_not_finite() -> None:
    report = make_step(loss=math.nan, grad_norm=math.inf, tokens=512, skipped=True, loss_scale=2.0)
    values = report.to_json()
    assert values["loss"] == "nan" and values["grad_norm"] == "inf"
    again = StepReport.from_json(values)
    assert again.loss is not None and math.isnan(again.loss)
    assert again.grad_norm == math.inf
    assert again.seconds == report.seconds


def test_a_missing_field_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match="wall_s"):
        StepReport.from_json({"step": 1, "seconds": {}})


def test_the_typical_step_leaves_out_the_extremes_and_still_sums() -> None:
    totals = RunTotals({"device": 10})
    for index, wall_s in enumerate((9.0, 1.0, 1.1, 0.9, 1.0, 0.1, 1.0, 1.0)):
        totals.add(make_step(index + 1, wall_s, loss=5.0 - index, tokens=100, link_nbytes={"disk read": 10}))
    report = totals.report()
    assert report.step_s == pytest.approx(1.0, rel=0.05)
    assert sum(report.seconds.values()) == pytest.approx(report.step_s)
    assert (report.steps, report.tokens, report.link_nbytes) == (8, 800, {"disk read": 80})
    assert (report.first_loss, report.last_loss) == (5.0, -2.0)
    assert report.total_s == pytest.approx(15.1)
    assert report.tokens_per_s == pytest.approx(800 / 15.1)
    assert report.planned_nbytes == {"device": 10}


def test_the_first_step_is_typical_only_where_it_is_alone() -> None:
    totals = RunTotals()
    totals.add(make_step(1, 9.0, start_s=22.0))
    assert totals.report().step_s == 9.0
    for number in (2, 3):
        totals.add(make_step(number, 5.0))
    report = totals.report()
    assert (report.step_s, report.start_s) == (5.0, 22.0)


def test_the_first_steps_clock_starts_when_the_run_is_assembled(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(report_module.time, "perf_counter", lambda: now_s)
    meter = StepMeter(Recorder(), Ledger({}))
    now_s = 22.0
    meter.begin()
    found = []
    for number, now_s in ((1, 27.0), (2, 31.0)):  # noqa: B007
        meter.finish(number)
        assert meter.report is not None
        found.append((meter.report.start_s, meter.report.wall_s))
    assert found == [(22.0, 5.0), (0.0, 4.0)]


@pytest.mark.parametrize("count", range(1, 10))
def test_the_middle_half_is_never_empty(count: int) -> None:
    kept = middle_half([make_step(wall_s=float(index)) for index in range(count)])
    assert count / 2 <= len(kept) <= count


def test_a_run_of_no_steps_has_a_report() -> None:
    report = RunTotals().report()
    assert (report.steps, report.tokens_per_s, report.bound_by) == (0, 0.0, "nothing measured")
    assert RunReport.from_json(report.to_json()) == report
