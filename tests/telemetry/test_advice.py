"""The sentence that says why steps take as long as they do: it names what was measured, and settings that exist."""

import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tiered_zero.config.load import load
from tiered_zero.telemetry.advice import NAMES, explain_pace, explain_prediction
from tiered_zero.telemetry.report import CAUSES, RunReport, RunTotals, StepMeter, StepReport
from tiered_zero.telemetry.spans import LANES, Ledger, Recorder, Totals


def report(seconds: dict[str, float], busy_s: dict[str, float]) -> RunReport:
    totals = RunTotals({"host": 1})
    totals.add(StepReport(step=1, wall_s=sum(seconds.values()), seconds=seconds, busy_s=busy_s))
    return totals.report()


@pytest.mark.parametrize(
    ("seconds", "busy_s", "expected"),
    [
        ({"forward": 0.9, "wait_param": 0.1}, {"compute": 0.9, "disk read": 0.5}, r"the model's own compute takes 90%"),
        (
            {"forward": 0.3, "wait_update": 0.7},
            {"compute": 0.3, "disk read": 0.95},
            r"reading from the swap directory takes 95%",
        ),
        ({"forward": 0.3, "wait_update": 0.7}, {"compute": 0.3, "update": 0.8}, r"the optimizer's update takes 80%"),
        (
            {"forward": 0.3, "save": 0.7},
            {"compute": 0.3, "save": 0.7},
            r"saving checkpoints takes 70%.*fewer saves",
        ),
        ({"forward": 0.5, "other": 0.5}, {"compute": 0.5}, r"50% of a typical step .* outside of the engine"),
        (
            {"forward": 0.4, "wait_param": 0.35, "wait_grad": 0.25},
            {"compute": 0.4, "fetch": 0.3},
            r"35% of a typical step .* compute waits for .*\(wait_param\)\. .* the model's own compute, with 40%",
        ),
        ({"forward": 0.4, "wait_update": 0.6}, {"compute": 0.4, "update": 0.5}, r"60% .* waits for an update .*cores"),
        ({"forward": 0.4, "wait_update": 0.6}, {"compute": 0.4, "disk read": 0.6}, r"60% .* waits for an .*nvme_path"),
        (
            {"forward": 0.5, "backward": 0.5},
            {"compute": 0.6},
            r"its busiest resource is the model's own compute, with 60%\.$",
        ),
        ({}, {}, r"^$"),
    ],
)
def test_it_names_what_sets_the_pace(seconds: dict[str, float], busy_s: dict[str, float], expected: str) -> None:
    assert re.search(expected, explain_pace(report(seconds, busy_s)))


def test_cores_that_other_processes_hold_are_named_before_a_faster_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets 84 of the 300 CPU seconds that two threads could have in 150 s; then 280 of them."""
    clock = Mock(**{"perf_counter.side_effect": [0.0, 150.0, 300.0], "process_time.side_effect": [5.0, 89.0, 369.0]})
    monkeypatch.setattr("tiered_zero.telemetry.report.time", clock)
    recorder = Mock(spec=Recorder)
    recorder.take_totals.return_value = Totals(causes={"forward": 150.0}, busy_s={"compute": 150.0})
    meter = StepMeter(recorder, Ledger({}), num_threads=2)
    for share, said in ((84 / 300, "got 28% of the CPU seconds"), (280 / 300, "a faster device")):
        meter.finish(1)
        assert meter.report is not None and meter.report.cpu_share == pytest.approx(share)
        totals = RunTotals()
        totals.add(StepReport.from_json(meter.report.to_json()))
        text = explain_pace(totals.report())
        assert said in text and ("a faster device" in text) == (share > 0.5)


def test_a_wait_that_takes_little_is_no_cause() -> None:
    text = explain_pace(report({"forward": 0.69, "wait_state": 0.01, "backward": 0.3}, {"compute": 0.6}))
    assert "wait_state" not in text and "shorten" not in text and "buffer_count" not in text


def test_offloading_is_not_said_to_cost_little_where_nothing_is_offloaded() -> None:
    found = report({"forward": 1.0}, {"compute": 0.9})
    assert "Offloading costs little" in explain_pace(found)
    assert "Offloading" not in explain_pace(replace(found, planned_nbytes={"device": 1}))


def test_every_name_in_a_report_has_a_meaning() -> None:
    assert {*CAUSES, *LANES} <= NAMES.keys()


def test_every_setting_that_is_named_exists() -> None:
    known = {line.path.rsplit(".", 1)[-1] for line in load({"train_batch_size": 1}).explain()}
    sentences = [remedy for _, remedy in NAMES.values()]
    named = {word.rsplit(".", 1)[-1] for text in sentences for word in re.findall(r"\b\w+(?:_\w+)+(?:\.\w+)*", text)}
    assert len(named) > 8 and named <= known


def test_a_prediction_is_compared_lane_by_lane_if_it_is_of_as_many_tokens() -> None:
    predicted = {"tokens": 64.0, "step": 1.0, "compute": 0.8, "disk read": 0.9}
    totals = RunTotals(predicted=predicted)
    assert explain_prediction(totals.report()) == "", "without a step"
    busy_s = {"compute": 0.9, "disk read": 1.5, "update": 0.1}
    totals.add(StepReport(step=1, wall_s=2.0, seconds={}, busy_s=busy_s, tokens=64))
    rows = [("step", 1.0, 2.0), ("compute", 0.8, 0.9), ("disk read", 0.9, 1.5)]
    assert totals.report().prediction_rows() == rows
    text = explain_prediction(totals.report())
    assert "1 s a step (-50%)" in text and "largest miss is disk read: 0.9 s predicted, 1.5 s busy" in text
    totals.add(StepReport(step=2, wall_s=2.0, seconds={}, busy_s=busy_s, tokens=32))
    assert totals.report().prediction_rows() == [] and explain_prediction(totals.report()) == ""
