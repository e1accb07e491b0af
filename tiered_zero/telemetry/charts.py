"""Draw charts as inline SVG. The page's style defines a CSS class for each colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from statistics import fmean

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
NOT_RECORDED = '<p class="none">Not recorded.</p>'
MAX_POINTS = 120
"""The most points that a chart draws for one series. See `thin`."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named series of points (x, y), sorted by x. `style`: the CSS class of the series' colour."""

    name: str
    style: str
    points: Points


class Plot:
    """A plotting area with axes, as SVG. `x` and `y` convert values to px."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]):
        self.left, self.right, self.top, self.bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
        self._x_range, self._y_range = _widened(x_range), _widened(y_range)
        self._parts: list[str] = []

    def x(self, value: float) -> float:
        low, high = self._x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self._y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def draw(self, svg: str) -> None:
        self._parts.append(svg)

    def text(self, x: float, y: float, text: str, style: str) -> None:
        self.draw(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def x_axis(self, label: str) -> None:
        """Draw the x axis, with ticks at whole numbers."""
        self.draw(f'<path class="axis" d="M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}"/>')
        for tick in ticks(*self._x_range, count=8, smallest=1.0):
            x = self.x(tick)
            self.draw(f'<path class="axis" d="M{x:.1f} {self.bottom:.1f}v4"/>')
            self.text(x, self.bottom + 16, format_tick(tick), "tick middle")
        self.text((self.left + self.right) / 2, HEIGHT - 6, label, "label middle")

    def y_axis(self, label: str) -> None:
        for tick in ticks(*self._y_range, count=5):
            y = self.y(tick)
            self.draw(f'<path class="grid" d="M{self.left:.1f} {y:.1f}H{self.right:.1f}"/>')
            self.text(self.left - 6, y + 4, format_tick(tick), "tick end")
        middle = (self.top + self.bottom) / 2
        self.draw(
            f'<text class="label middle" transform="translate(13 {middle:.1f}) rotate(-90)">{escape(label)}</text>'
        )

    def svg(self, title: str) -> str:
        inner = "\n".join(self._parts)
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}" style="max-width: {WIDTH}px"'
        return f'<svg {box} role="img" aria-label="{escape(title)}">\n{inner}\n</svg>'


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], from_zero: bool = False) -> str:
    """Draw one line per series. The line is interrupted where y is not finite. `from_zero`: begin the y axis at 0."""
    thinned = [Series(name=line.name, style=line.style, points=thin(line.points)) for line in series]
    ys = [y for line in thinned for _, y in line.points if math.isfinite(y)]
    if not ys:
        return NOT_RECORDED
    xs = [x for line in series for x, _ in line.points]
    plot = Plot((min(xs), max(xs)), rounded(0.0 if from_zero else min(ys), max(ys)))
    plot.y_axis(y_label)
    plot.x_axis(x_label)
    for line in thinned:
        runs = groupby(line.points, key=lambda point: math.isfinite(point[1]))
        for run in ([*points] for is_finite, points in runs if is_finite):
            path = "L".join(f"{plot.x(x):.1f} {plot.y(y):.1f}" for x, y in run)
            plot.draw(f'<path class="line {line.style}" d="M{path}"><title>{escape(line.name)}</title></path>')
            if len(run) == 1:
                x, y = run[0]
                plot.draw(f'<circle class="{line.style}" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="3"/>')
    return plot.svg(title)


def stacked_chart(title: str, x_label: str, y_label: str, layers: Sequence[Series], most: float = math.inf) -> str:
    """Draw stacked bars, the first layer at the bottom. All layers have the same x values. `most`: the y value at which
    higher bars are cut off."""
    thinned = [thin(layer.points) for layer in layers]
    if not thinned or not thinned[0]:
        return NOT_RECORDED
    xs = [x for x, _ in thinned[0]]
    step = min((after - before for before, after in pairwise(xs)), default=1.0)
    highest = max(sum(points[index][1] for points in thinned) for index in range(len(xs)))
    plot = Plot((xs[0] - step / 2, xs[-1] + step / 2), rounded(0.0, min(highest, most)))
    plot.y_axis(y_label)
    width = max(0.5, plot.x(xs[0] + step) - plot.x(xs[0]) - 0.6)
    base = [0.0] * len(xs)
    for layer, points in zip(layers, thinned, strict=True):
        for index, (x, value) in enumerate(points):
            top, bottom = (plot.y(min(edge, most)) for edge in (base[index] + value, base[index]))
            base[index] += value
            if bottom - top >= 0.05:
                tip = f"{layer.name}: {value:.3g} {y_label}, {x_label} {x:g}"
                plot.draw(_rect(plot.x(x) - width / 2, top, width, bottom - top, layer.style, tip))
    plot.x_axis(x_label)
    return plot.svg(title)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Render (style, text) pairs as a line of coloured words."""
    items = "".join(f'<li><i class="{style}"></i>{escape(text)}</li>' for style, text in entries)
    return f'<ul class="legend">{items}</ul>'


def rounded(low: float, high: float) -> tuple[float, float]:
    """Widen a range so that it begins and ends at ticks of the axis."""
    low, high = _widened((low, high))
    step = _tick_step(low, high, count=5)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def ticks(low: float, high: float, count: int, smallest: float = 0.0) -> list[float]:
    """Return about `count` ticks within [low, high]: multiples of a step. The step is 1, 2 or 5 times a power of ten,
    but at least `smallest`."""
    step = max(smallest, _tick_step(low, high, count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _tick_step(low: float, high: float, count: int) -> float:
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def format_tick(value: float) -> str:
    """Format a tick: 1500 becomes 1,500; 0.30000000000000004 becomes 0.3."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def thin(points: Points) -> Points:
    """Return `points` if there are at most MAX_POINTS. Otherwise cut `points` into at most MAX_POINTS equally long
    parts, and return the mean of each part. A shorter last part is left out."""
    if len(points) <= MAX_POINTS:
        return points
    length = -(-len(points) // MAX_POINTS)
    parts = [points[start : start + length] for start in range(0, len(points), length)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts if len(part) == length]


def _widened(low_high: tuple[float, float]) -> tuple[float, float]:
    """Return the range, widened if its length is 0. It is widened only a little, so that the axis has a tick near its
    value."""
    low, high = low_high
    margin = min(0.5, abs(low) / 4)
    return (low, high) if high > low else (low - margin, high + margin) if margin > 1e-12 else (0.0, 1.0)


def _rect(x: float, y: float, width: float, height: float, style: str, tip: str) -> str:
    box = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="{style}" {box}><title>{escape(tip)}</title></rect>'
