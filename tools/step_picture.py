"""The timeline of one step as a picture of its own, from a run's record.

    python tools/step_picture.py run.jsonl docs/step.svg      every lane, with the names of units
    python tools/step_picture.py run.jsonl step.png           four rows: compute, copies each way, update

The record is what a run writes to `"tiered_zero": {"report": "run.jsonl"}`; the timeline in it is of its third step.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tiered_zero.telemetry.page import STYLE, draw_timeline
from tiered_zero.telemetry.runlog import Timeline, read_run
from tiered_zero.telemetry.spans import is_wait

Intervals = Sequence[tuple[float, float]]
"""Starts and ends in seconds."""

ROWS = {"compute": "compute", "fetch": "H2D", "reduce": "D2H", "update": "update"}
"""Lane -> its row on a PNG."""


def rows_of(timeline: Timeline) -> dict[str, Intervals]:
    """Row -> when its lane worked, in time.perf_counter() seconds; waits are left out."""
    rows: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS.values()}
    waits: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS.values()}
    for span in timeline.spans:
        if span.lane in ROWS:
            (waits if is_wait(span.kind) else rows)[ROWS[span.lane]].append((span.start_s, span.end_s))
    return {name: without(spans, waits[name]) for name, spans in rows.items()}


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


# -- the command -------------------------------------------------------------------------------------------------------


def draw_svg(timeline: Timeline, out: Path) -> None:
    svg = draw_timeline(timeline)
    head, body = svg.split(">", maxsplit=1)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    ground = '<rect width="100%" height="100%" style="fill: var(--card)"/>'
    out.write_text(f"{head}>\n<style>{STYLE}</style>\n{ground}{body}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    timeline = read_run(options.run).timeline
    if timeline is None or not timeline.spans:
        parser.error(f"{options.run} holds no timeline; train a few steps and close the engine")
    if options.out.suffix == ".png":
        window = min(span.start_s for span in timeline.spans), max(span.end_s for span in timeline.spans)
        draw_png(rows_of(timeline), window, f"step {timeline.step}", options.out)
    else:
        draw_svg(timeline, options.out)


if __name__ == "__main__":
    main()
