"""Draw one step of a run's trace as a picture of its own.

    python tools/step_picture.py trace.json docs/step.svg      every lane, with the names of units
    python tools/step_picture.py trace.json step.png           four rows: compute, copies each way, update

The trace is the file that a run writes with `"tiered_zero": {"trace": "trace.json"}`.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tiered_zero.sizes import format_nbytes
from tiered_zero.telemetry.charts import format_tick, ticks
from tiered_zero.telemetry.page import COLOURS as PAGE_COLOURS
from tiered_zero.telemetry.page import INKS
from tiered_zero.telemetry.spans import DRIVER_LANE, is_wait

Intervals = Sequence[tuple[float, float]]
"""Starts and ends in seconds."""

ROWS = {"compute": "compute", "fetch": "H2D", "reduce": "D2H", "update": "update"}
"""Lane -> its row on a PNG."""


class TraceSpan(NamedTuple):
    """A span of a trace. `row`: the id and the name of its row. `start_s`, `end_s`: time.perf_counter() seconds."""

    row: tuple[int, str]
    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    nbytes: int


def read_trace(path: Path) -> list[TraceSpan]:
    """Read the spans of a trace, also of one that has no end because its run was killed."""
    events = json.loads(path.read_text(encoding="utf-8").rstrip(",\n]") + "]")
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        TraceSpan(
            row=(event["tid"], names[event["tid"]]),
            lane=event["args"]["lane"],
            kind=event["cat"],
            name=event["name"],
            start_s=event["ts"] / 1e6,
            end_s=(event["ts"] + event["dur"]) / 1e6,
            nbytes=event["args"].get("bytes", 0),
        )
        for event in events
        if event["ph"] == "X"
    ]


def step_window(spans: Sequence[TraceSpan], step: int) -> tuple[float, float] | None:
    """Return start and end of the trace's step number `step`, from 1; None if the trace does not have that step."""
    ends = sorted(span.end_s for span in spans if (span.lane, span.kind) == (DRIVER_LANE, "step"))
    edges = [min((span.start_s for span in spans), default=0.0), *ends]
    return (edges[step - 1], edges[step]) if 1 <= step <= len(ends) else None


def rows_of(spans: Iterable[TraceSpan], window: tuple[float, float]) -> dict[str, Intervals]:
    """Return row -> when its lane worked inside of `window`, without its waits."""
    rows: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS.values()}
    waits: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS.values()}
    for span in spans:
        if span.lane in ROWS:
            (waits if is_wait(span.kind) else rows)[ROWS[span.lane]].append((span.start_s, span.end_s))
    return {name: without(cut(found, window), cut(waits[name], window)) for name, found in rows.items()}


def merge(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that overlap or touch."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def cut(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> list[tuple[float, float]]:
    """Merge intervals, and keep what lies inside of `window`."""
    inside = ((max(start, window[0]), min(end, window[1])) for start, end in merge(intervals))
    return [(start, end) for start, end in inside if start < end]


def without(intervals: Intervals, others: Intervals) -> list[tuple[float, float]]:
    """Merge intervals, and take `others` out of them."""
    left: list[tuple[float, float]] = []
    gaps = merge(others)
    for start, end in merge(intervals):
        for gap_start, gap_end in gaps:
            if gap_start < end and gap_end > start:
                left.append((start, max(start, gap_start)))
                start = max(start, gap_end)
        left.append((start, end))
    return [(start, end) for start, end in left if start < end]


# -- a PNG without a library -------------------------------------------------------------------------------------------

WIDTH, ROW, GAP, LEFT, SCALE = 1600, 56, 24, 170, 3
COLOURS = {"compute": (46, 125, 80), "H2D": (52, 104, 192), "D2H": (214, 122, 36), "update": (140, 72, 160)}
GROUND, TRACK, INK = (255, 255, 255), (236, 238, 241), (40, 44, 52)

GLYPHS = dict(
    zip(
        "0123456789abcdefghijklmnopqrstuvwxyz.%/:,- ",
        (
            "75557 26227 71747 71717 55711 74717 74757 71111 75757 75717 25755 65656 34443 65556 74647 74644 34553 "
            "55755 72227 11156 55655 44447 57755 65555 25552 65644 25563 65655 34216 72222 55557 55552 55775 55255 "
            "55222 71247 00002 51245 11244 02020 00024 00700 00000"
        ).split(),
        strict=True,
    )
)
"""Five rows of three pixels: an octal digit a row."""


def draw_png(rows: Mapping[str, Intervals], window: tuple[float, float], title: str, out: Path) -> None:
    """Draw a row of `window` for each entry; a pixel is as dark as the part of its time that is busy."""
    height = GAP * 3 + (ROW + GAP) * len(rows) + GAP
    image = [[GROUND] * WIDTH for _ in range(height)]
    num_pixels, seconds = WIDTH - LEFT - GAP, window[1] - window[0]
    _write(image, LEFT, GAP, title)
    for number, (name, intervals) in enumerate(rows.items()):
        top = GAP * 3 + number * (ROW + GAP)
        busy = [0.0] * num_pixels
        for start, end in cut(intervals, window):
            first, last = ((time - window[0]) / seconds * num_pixels for time in (start, end))
            for pixel in range(int(first), min(int(last) + 1, num_pixels)):
                busy[pixel] += max(0.0, min(last, pixel + 1) - max(first, pixel))
        colour = COLOURS.get(name, INK)
        line = [
            tuple(round(track + (full - track) * min(part, 1.0)) for track, full in zip(TRACK, colour, strict=True))
            for part in busy
        ]
        for y in range(top, top + ROW):
            image[y][LEFT : LEFT + num_pixels] = line  # type: ignore[assignment]
        _write(image, GAP, top + 12, name)
        _write(image, GAP, top + 34, f"{100 * sum(busy) / num_pixels:.0f}%")
    for quarter in range(5):
        text = f"{1000 * seconds * quarter / 4:.4g} ms"
        place = LEFT + num_pixels * quarter // 4 - (len(text) * 4 * SCALE if quarter == 4 else 0)
        _write(image, place, height - GAP - 4, text)
    raw = b"".join(b"\0" + bytes(value for pixel in line for value in pixel) for line in image)
    header = struct.pack(">IIBBBBB", WIDTH, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")
    out.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    )


def _write(image: list[list[tuple[int, int, int]]], left: int, top: int, text: str) -> None:
    for number, letter in enumerate(text.lower()):
        for y, digit in enumerate(GLYPHS.get(letter, GLYPHS[" "])):
            for x in range(3):
                if int(digit) & 4 >> x:
                    start = left + (4 * number + x) * SCALE
                    for line in range(top + y * SCALE, top + (y + 1) * SCALE):
                        if start + SCALE <= WIDTH:
                            image[line][start : start + SCALE] = [INK] * SCALE


# -- an SVG -----------------------------------------------------------------------------------------------------------

WIDE, ROW_HEIGHT, CHAR_WIDTH = 1320, 24, 7.3
"""In px. Width of a character of 13 px: slightly more than average."""

PALETTE = {
    "compute": ("#2f6fb5", "#6aa5e0"),
    "disk read": ("#4a8638", "#88c476"),
    "disk write": ("#a8651f", "#e0a860"),
    "all_gather": ("#4d6fae", "#93b0e6"),
    "reduce_scatter": ("#7a5c99", "#bda0dd"),
    "activations": ("#3f8f6f", "#7fcfaf"),
    "inside": ("#ffffff", "#101416"),
    **PAGE_COLOURS,
    **INKS,
}
"""Name of a kind, lane, text or surface -> its (light, dark) colours; `inside` is text on a bar."""


def _rules(theme: int) -> str:
    return " ".join(f".{name.replace(' ', '-')} {{ fill: {pair[theme]} }}" for name, pair in PALETTE.items())


def _rect(style: str, x: float, y: float, width: float, height: float, inner: str = "") -> str:
    box = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="{style.replace(" ", "-")}" {box}>{inner}</rect>'


def _text(style: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def draw_svg(spans: Iterable[TraceSpan], window: tuple[float, float], out: Path) -> None:
    """Draw what lies inside of `window`: the rows of the trace, and the names that fit into their bars."""
    inside = (
        span._replace(start_s=max(span.start_s, window[0]), end_s=min(span.end_s, window[1]))
        for span in spans
        if span.start_s < window[1] and span.end_s > window[0]
    )
    bars = sorted(inside, key=lambda span: (span.row, span.start_s, -span.end_s))
    rows = sorted({bar.row for bar in bars})
    left, right = 24 + CHAR_WIDTH * max(len(name) for _, name in rows), WIDE - 16
    bottom, all_ms = 12 + ROW_HEIGHT * len(rows), 1e3 * (window[1] - window[0])
    pixels = (right - left) / all_ms
    parts = [_rect("card", 0, 0, WIDE, bottom + 44)]
    for number, (_, name) in enumerate(rows, start=1):
        y = 12 + ROW_HEIGHT * number
        parts += [_rect("rule", left, y, right - left, 1), _text("soft", left - 8, y - 8, name, "end")]
    for bar, following in zip_longest(bars, bars[1:]):
        style = bar.kind if is_wait(bar.kind) or bar.lane == DRIVER_LANE else bar.lane
        ms, moved = 1e3 * (bar.end_s - bar.start_s), f", {format_nbytes(bar.nbytes)}" if bar.nbytes else ""
        tip = f"<title>{escape(f'{bar.lane}: {bar.name} ({bar.kind}), {ms:.3g} ms{moved}')}</title>"
        x, y = left + 1e3 * (bar.start_s - window[0]) * pixels, 15 + ROW_HEIGHT * rows.index(bar.row)
        parts.append(_rect(style if style in PALETTE else "other", x, y, max(0.4, ms * pixels), ROW_HEIGHT - 6, tip))
        if following is not None and following.row == bar.row:  # `following` may lie inside this bar, and covers it
            ms = min(ms, 1e3 * (following.start_s - bar.start_s))
        if len(bar.name) * CHAR_WIDTH + 6 <= ms * pixels:
            parts.append(_text("inside", x + 4, y + 13, bar.name))
    for tick in ticks(0.0, all_ms, count=8):
        x = left + tick * pixels
        parts += [_rect("soft", x, bottom, 1, 4), _text("soft", x, bottom + 18, format_tick(tick), "middle")]
    parts.append(_text("ink", (left + right) / 2, bottom + 38, "ms", "middle"))
    style = f"text {{ font: 13px system-ui, sans-serif }} {_rules(0)}"
    style += f" @media (prefers-color-scheme: dark) {{ {_rules(1)} }}"
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {bottom + 44}"'
    body = "\n".join((f"<style>{style}</style>", *parts))
    out.write_text(f"<svg {box}>\n{body}\n</svg>\n", encoding="utf-8")


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int, default=3, help="from 1; units are prefetched in the third (default)")
    options = parser.parse_args()
    spans = read_trace(options.trace)
    window = step_window(spans, options.step)
    if window is None:
        parser.error(f"{options.trace} does not have step {options.step}; train more steps")
    if options.out.suffix == ".png":
        draw_png(rows_of(spans, window), window, f"step {options.step}", options.out)
    else:
        draw_svg(spans, window, options.out)


if __name__ == "__main__":
    main()
