"""The sentence that says why steps take as long as they do: it names what really sets the pace."""

import re

import pytest

from tiered_zero.config import load
from tiered_zero.telemetry.advice import MEANINGS, explain_pace
from tiered_zero.telemetry.report import CAUSES, RunReport, RunTotals, StepReport
from tiered_zero.telemetry.spans import LANES


def report(seconds: dict[str, float], busy_s: dict[str, float]) -> RunReport:
    totals = RunTotals()
    totals.add(StepReport(step=1, wall_s=sum(seconds.values()), seconds=seconds, busy_s=busy_s))
    return totals.report()


@pytest.mark.parametrize(
    ("seconds", "busy_s", "expected"),
    [
        ({"forward": 0.9, "wait_param": 0.1}, {"compute": 0.9, "disk read": 0.5}, r"the model's own compute takes 90%"),
        ({"forward": 0.3, "wait_update": 0.7}, {"compute": 0.3, "disk read": 0.95}, r"reading from the disk takes 95%"),
        ({"forward": 0.3, "wait_update": 0.7}, {"compute": 0.3, "update": 0.8}, r"update on the CPU takes 80%"),
        ({"forward": 0.5, "other": 0.5}, {"compute": 0.5}, r"50% of a typical step .* outside of the engine"),
        (
            {"forward": 0.4, "wait_param": 0.35, "wait_grad": 0.25},
            {"compute": 0.4, "gather": 0.3},
            r"35% of a typical step .* compute waits for .*\(wait_param\)\. .* the model's own compute, with 40%"
            r".*stage3_prefetch_bucket_size",
        ),
        ({"forward": 0.4, "wait_update": 0.6}, {"compute": 0.4, "update": 0.5}, r"60% .* waits for an update .*cores"),
        ({"forward": 0.4, "wait_update": 0.6}, {"compute": 0.4, "disk read": 0.6}, r"60% .* waits for an .*bench io"),
        (
            {"forward": 0.5, "backward": 0.5},
            {"compute": 0.6},
            r"its busiest resource is the model's own compute, with 60%",
        ),
        ({}, {}, r"^$"),
    ],
)
def test_it_names_what_sets_the_pace(seconds: dict[str, float], busy_s: dict[str, float], expected: str) -> None:
    assert re.search(expected, explain_pace(report(seconds, busy_s)))


def test_every_name_in_a_report_has_a_meaning() -> None:
    assert {*CAUSES, *LANES} - {"compute"} <= MEANINGS.keys()


def test_every_setting_that_is_named_exists() -> None:
    known = {line.path.rsplit(".", 1)[-1] for line in load({"train_batch_size": 1}).explain()}
    sentences = [explain_pace(report({"forward": 1.0}, {lane: 1.0})) for lane in LANES]
    sentences += [explain_pace(report({"forward": 0.4, cause: 0.6}, {"compute": 0.4})) for cause in CAUSES[4:-1]]
    named = {word.rsplit(".", 1)[-1] for text in sentences for word in re.findall(r"\b\w+(?:_\w+)+(?:\.\w+)*", text)}
    assert len(named) > 8
    assert named - {name for name in named if name.startswith("wait_")} <= known
