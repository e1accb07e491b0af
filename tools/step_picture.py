"""The timeline of one step as a picture of its own, from a run's record.

    python tools/step_picture.py run.jsonl docs/step.svg

The record is what a run writes to `"tiered_zero": {"report": "run.jsonl"}`; the timeline in it is of its last steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tiered_zero.telemetry.page import draw_timeline
from tiered_zero.telemetry.page_style import STYLE
from tiered_zero.telemetry.runlog import read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    timeline = read_run(options.run).timeline
    if timeline is None or not timeline.spans:
        parser.error(f"{options.run} holds no timeline; train a few steps and close the engine")
    svg = draw_timeline(timeline)
    head, body = svg.split(">", maxsplit=1)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    ground = '<rect width="100%" height="100%" style="fill: var(--card)"/>'
    options.out.write_text(f"{head}>\n<style>{STYLE}</style>\n{ground}{body}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
