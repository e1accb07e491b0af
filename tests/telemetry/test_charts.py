"""Charts are well-formed SVG that stays inside its frame, and ticks are round."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.telemetry.charts import (
    MAX_POINTS,
    NOT_RECORDED,
    Series,
    legend,
    line_chart,
    rounded,
    stacked_chart,
    thin,
    ticks,
)

NASTY = 'a<b>&"c'


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def line(points: list[tuple[float, float]]) -> list[Series]:
    return [Series(name=NASTY, style="c0", points=points)]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_round_evenly_spaced_and_inside(low: float, span: float, count: int) -> None:
    high = low + span
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high, count)
    step = found[1] - found[0] if len(found) > 1 else 1.0
    assert len(found) <= count + 2
    assert all(low - 1e-6 * step <= tick <= high + 1e-6 * step for tick in found)


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_rounded_range_holds_its_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    bottom, top = rounded(low, high)
    assert bottom <= low * (1 + 1e-9) and top >= high * (1 - 1e-9) and bottom < top


@pytest.mark.parametrize("count", [1, 2, MAX_POINTS, MAX_POINTS + 1, 1000])
def test_thinning_keeps_the_mean_and_bounds_the_count(count: int) -> None:
    points = [(float(index), 3.0) for index in range(count)]
    thinned = thin(points)
    assert 1 <= len(thinned) <= MAX_POINTS
    assert {y for _, y in thinned} == {3.0}


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 5.0)],
        [(1.0, 5.0), (2.0, 5.0)],
        [(1.0, 0.0), (2.0, 0.0)],
        [(float(x), math.sin(x)) for x in range(500)],
        [(1.0, 1.0), (2.0, math.nan), (3.0, math.inf), (4.0, 2.0), (5.0, 3.0)],
        [(1.0, 1e-12), (2.0, 1e12)],
    ],
)
def test_a_line_chart_is_well_formed_and_inside_its_frame(points: list[tuple[float, float]]) -> None:
    svg = parse(line_chart(NASTY, "step", "loss", line(points)))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for path in svg.iterfind("path"):
        if path.attrib["class"].startswith("line"):
            pairs = [pair.split() for pair in path.attrib["d"].lstrip("M").split("L")]
            assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in pairs)
    assert [text.text for text in svg.iterfind("text") if text.attrib["class"].startswith("label")] == ["loss", "step"]


@pytest.mark.parametrize("value", [1e-3, 2e-5, 7e-4, 5.0, 1.0])
def test_a_constant_has_its_value_on_the_axis(value: float) -> None:
    svg = parse(line_chart("", "step", "lr", line([(1.0, value), (2.0, value)])))
    assert f"{value:g}" in [text.text for text in svg.iterfind("text") if text.attrib["class"] == "tick end"]


def test_what_is_not_finite_breaks_the_line() -> None:
    svg = parse(line_chart("", "x", "y", line([(1, 1), (2, 2), (3, math.nan), (4, 4), (5, 5)])))
    assert len([path for path in svg.iterfind("path") if path.attrib["class"].startswith("line")]) == 2


def test_nothing_recorded_is_said() -> None:
    assert line_chart("", "x", "y", line([(1, math.nan)])) == NOT_RECORDED
    assert line_chart("", "x", "y", []) == NOT_RECORDED
    assert stacked_chart("", "x", "y", []) == NOT_RECORDED


def test_stacked_bars_stand_on_each_other() -> None:
    layers = [
        Series(name=name, style="c0", points=[(1, value), (2, value)]) for name, value in (("a", 1.0), ("b", 2.0))
    ]
    boxes = [
        {name: float(box.attrib[name]) for name in ("x", "y", "height")}
        for box in parse(stacked_chart("", "step", "s", layers)).iterfind("rect")
    ]
    lower, upper = boxes[0], boxes[2]
    assert upper["y"] + upper["height"] == pytest.approx(lower["y"], abs=0.05)
    assert upper["height"] == pytest.approx(2 * lower["height"], abs=0.05)


def test_a_legend_is_escaped() -> None:
    (item,) = parse(legend([("c0", NASTY)]))
    assert "".join(item.itertext()) == NASTY
