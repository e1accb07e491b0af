"""Write the plans in README.md and docs/recipes.md: the chart, the table, the heads of the recipes.

    python tools/first_screen.py            # rewrite the pages between their markers, and docs/where_8b_rests.svg
    python tools/first_screen.py --check    # exit 1 if one of them differs from the plans or the records

Seconds of a plan are modelled, from the machines under configs/machines; those of records were measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from click.testing import CliRunner

from tiered_zero.cli.main import main as command_line
from tiered_zero.plan.gpt_shape import num_parameters, parse_gpt

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "docs" / "where_8b_rests.svg"
LLAMA = ("--model-config", "configs/models/llama_8b.json")
RECIPES = {
    "desktop": ("rtx4090", (*LLAMA, "--sequence-length", "2048")),
    "server": ("h100", (*LLAMA, "--sequence-length", "2048")),
    "two_cores": ("two_cores", ("--model", "gpt:layers=60,hidden=1024,context=512", "--host-memory", "1.8GiB")),
}
"""Name of a config in configs/recipes -> its machine in configs/machines, and more options of `plan`."""

KINDS = {
    "parameters": ("#2f6fb5", "parameters (bf16)"),
    "gradients": ("#d9822b", "gradients"),
    "masters": ("#1f8a70", "fp32 masters and Adam's state"),
    "others": ("#9aa5ad", "buffers, activations"),
}
"""Kind of bytes on the chart -> its colour and its words."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Hold what `plan` prints. `gib`: tier -> kind of bytes -> GiB; `totals`: tier -> its bytes, as text."""

    head: str
    step_s: float
    tokens: int
    gib: Mapping[str, Mapping[str, float]]
    totals: Mapping[str, str]

    def total(self, kind: str) -> float:
        return sum(kinds.get(kind, 0.0) for kinds in self.gib.values())


def arguments(recipe: str) -> list[str]:
    machine, options = RECIPES[recipe]
    return [f"configs/recipes/{recipe}.json", "--machine", f"configs/machines/{machine}.json", *options]


def run_plan(recipe: str) -> Planned:
    given = [str(ROOT / word) if word.startswith("configs/") else word for word in arguments(recipe)]
    result = CliRunner().invoke(command_line, ["plan", *given])
    if result.exit_code:
        sys.exit(f"plan {recipe} failed:\n{result.output}")
    lines = result.stdout.replace(f"{ROOT}/", "").splitlines()
    first = next(index for index, line in enumerate(lines) if "parameters: " in line)
    end = next(index for index, line in enumerate(lines) if line.startswith("  update policy"))
    head = [line for line in lines[first : end + 1] if not re.match(r"  [23]\. ", line)]
    found = re.search(r"step of (\d+) tokens.*?1\. ([\d.]+) s a step", result.stdout, re.DOTALL)
    assert found is not None
    totals = dict(re.findall(r"^  (device|host|nvme): ([\d.]+ \w+)", "\n".join(head), re.MULTILINE))
    text = "\n".join(head)
    return Planned(head=text, tokens=int(found[1]), step_s=float(found[2]), gib=_by_tier(head), totals=totals)


def _by_tier(lines: list[str]) -> dict[str, dict[str, float]]:
    units, gib, tier = {"B": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 1024.0}, {}, ""
    for line in lines:
        if heading := re.match(r"  (device|host|nvme): ", line):
            tier = heading[1]
            gib[tier] = dict.fromkeys(KINDS, 0.0)
        elif row := re.match(r" +([\d.]+) (\w+)  (.+)", line):
            words = row[3]
            kind = (
                "masters" if words.startswith("master weights")
                else "parameters" if words in ("parameters", "parameters that stay on the device")
                else "gradients" if words == "gradients"
                else "others"
            )  # fmt: skip
            gib[tier][kind] += float(row[1]) * units[row[2]]
    return gib


def draw(plan: Planned) -> str:
    """Draw the bytes of the run in one bar, then the bars of the tiers; the GPU and memory have frames of their
    size."""
    scale, left, bars = 5.6, 170, []
    state = {kind: plan.total(kind) for kind in list(KINDS)[:3]}
    rows: list[tuple[str, str, Mapping[str, float], float]] = [
        ("all of it", f"{sum(state.values()):.0f} GiB", state, 0.0)
    ]
    for tier, name, size in (
        ("device", "GPU, 24 GB", 24.0),
        ("host", "memory, 64 GB", 64.0),
        ("nvme", "of a disk of 2 TB", 0.0),
    ):
        kinds = plan.gib.get(tier, {})
        rows.append((name, plan.totals.get(tier, "0 B"), kinds, size))
    for index, (name, text, kinds, size) in enumerate(rows):
        y, x = 60 + 48 * index + 12 * (index > 0), 1.0 * left
        bars.append(f'<text x="{left - 10}" y="{y + 20}" text-anchor="end">{name}</text>')
        for kind, gib in kinds.items():
            bars.append(f'<rect x="{x:.1f}" y="{y}" width="{gib * scale:.1f}" height="30" fill="{KINDS[kind][0]}"/>')
            x += gib * scale
        if size:
            bars.append(f'<rect class="frame" x="{left}" y="{y}" width="{size * scale:.1f}" height="30"/>')
        bars.append(f'<text x="{max(x, left + size * scale) + 8:.1f}" y="{y + 20}">{text}</text>')
    words, at = list[str](), 20
    for colour, text in KINDS.values():
        words.append(
            f'<rect x="{at}" y="18" width="12" height="12" fill="{colour}"/><text x="{at + 18}" y="29">{text}</text>'
        )
        at += 50 + 7 * len(text)
    style = (
        "text { font: 14px sans-serif; fill: #1c2126 } .frame { fill: none; stroke: #5b6670 } "
        "@media (prefers-color-scheme: dark) { text { fill: #e6eaed } .frame { stroke: #9aa7b1 } }"
    )
    body = "\n".join([*words, *bars])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 275">\n<style>{style}</style>\n{body}\n</svg>\n'


def table(plans: Mapping[str, Planned]) -> str:
    """Make the table: the rows that were modelled, then those that were measured."""
    records = ROOT / "tools" / "bench" / "records"
    ranks = [json.loads(line) for line in (records / "ranks.jsonl").read_text().splitlines()]
    needed = {"FSDP2 offload", "stage 3 cpu/cpu"}
    side = [record for record in ranks if needed <= set(record["median"])][-1]
    seconds, model = side["median"], side["arguments"]["model"]
    other = next((value for name, value in seconds.items() if name.startswith("DeepSpeed 3")), None)
    deepspeed = "not measured" if other is None else f"{other:.2f} s, without offload"
    desktop, server, small = (plans[name] for name in RECIPES)
    whole_gib = 16 * 8_030_261_248 / 2**30
    rows = [
        "| model, all weights trained | machine | tiered_zero | DeepSpeed | FSDP2 offload |",
        "|---|---|---|---|---|",
        f"| Llama 8B, {desktop.tokens:,} tokens | 24 GB + 64 GB + 2 TB | {desktop.step_s:.0f} s a step, modelled | "
        f"not measured | does not fit: {whole_gib:.0f} GiB of memory, modelled |",
        f"| Llama 8B, {server.tokens:,} tokens | 80 GB + 256 GB | {server.step_s:.1f} s a step, modelled | "
        "not measured | not measured |",
        f"| a GPT of 757M, {small.tokens:,} tokens | 2 cores, 1.8 GiB, disk | {small.step_s:.0f} s a step, modelled | "
        "not measured | does not fit, modelled |",
        f"| {model}, 2 processes, {side['arguments']['tokens']} tokens each | 2 cores | "
        f"{seconds['stage 3 cpu/cpu']:.2f} s a step, measured | {deepspeed}, measured | "
        f"{seconds['FSDP2 offload']:.2f} s, measured |",
        *(_next_to_deepspeed(records / "deepspeed.jsonl", tier) for tier in ("cpu", "nvme")),
    ]
    return "\n".join(rows) + "\n"


def _next_to_deepspeed(records: Path, tier: str) -> str:
    """Make the row of the last record of steps with everything on `tier`."""
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    record = [line for line in lines if line["arguments"]["tier"] == tier][-1]
    shape = parse_gpt(record["arguments"]["model"])
    own, other = (record["median"][f"{name}/{tier}"] for name in ("tiered_zero", "DeepSpeed"))
    place = "disk" if tier == "nvme" else "memory"
    return (
        f"| a GPT of {num_parameters(shape) / 1e6:.0f}M, {shape.context} tokens | 2 cores, {place} | "
        f"{own:.2g} s a step, measured | {other:.2g} s, measured | not measured |"
    )


def fill(text: str, made: Mapping[str, str]) -> str:
    """Put each text between its markers."""
    for name, block in made.items():
        pattern = re.compile(rf"(<!-- plan:{name} -->\n).*?(<!-- end:{name} -->)", re.DOTALL)
        text = pattern.sub(lambda found, block=block: found[1] + block + found[2], text)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    plans = {name: run_plan(name) for name in RECIPES}
    heads = {
        name: f"```\n$ tiered-zero plan {' '.join(arguments(name))}\n{plan.head}\n```\n" for name, plan in plans.items()
    }
    made = {"table": table(plans), **heads}
    texts = {CHART: draw(plans["desktop"])}
    for page in (ROOT / "README.md", ROOT / "docs" / "recipes.md"):
        texts[page] = fill(page.read_text(), made)
    for path, text in texts.items():
        if options.check and path.read_text() != text:
            sys.exit(f"{path.name} differs from the plans; run python tools/first_screen.py")
        path.write_text(text)


if __name__ == "__main__":
    main()
