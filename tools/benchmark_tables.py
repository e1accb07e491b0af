"""Write the tables of docs/benchmarks.md, and three figures of docs/placement.md, from the benchmark records.

    python tools/benchmark_tables.py            # rewrite the pages between their markers
    python tools/benchmark_tables.py --check    # exit 1 where a page differs from the records

The last record of each name in records/*.jsonl counts; of a step's, the last for each model, number of tokens and
clipping; of activations', the last for each hidden size, with torch's huge pages and without, and with fewer blocks of
plain PyTorch; of placements that are chosen, and of predicted steps, the last for each part.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tools" / "bench" / "records"
PAGE = ROOT / "docs" / "benchmarks.md"
PLACEMENT = ROOT / "docs" / "placement.md"
PLACEMENT_MARKERS = re.compile(r"(<!-- record:begin -->\n).*?(<!-- record:end -->)", re.DOTALL)
MARKERS = re.compile(r"(<!-- records:begin -->\n).*?(<!-- records:end -->)", re.DOTALL)


RAN_AS_BARRIER = ("cpu/cpu overlapped", "device/cpu overlapped", "cpu/device overlapped", "device/device overlapped")
"""On the CPU device, until the plan chose the policy: rows that repeat those of barrier."""


def last_records() -> dict[tuple[Any, ...], dict[str, Any]]:
    """(name, model, tokens, clipping, or micro-batches of ranks, or what is said above of activations) -> record."""
    records = {}
    for path in sorted(RECORDS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["name"] not in TABLES:
                continue  # of a page of its own
            arguments = record["arguments"]
            kind = arguments.get("clip", arguments.get("accumulation", arguments.get("part", 0.0)))
            if record["name"] == "activations":
                kind = arguments["hidden"], arguments.get("huge_pages", False), "plain_blocks" in arguments
            kind = arguments.get("only", arguments.get("tier", kind))
            records[record["name"], arguments.get("model", ""), arguments.get("tokens", 0), kind] = record
    return records


def headline(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """A step as a multiple of plain PyTorch's, over all records of 124M, and the last one of 1.3B without clipping."""
    small = [record for (name, model, _, _), record in records.items() if (name, model) == ("step", "gpt2-124m")]
    large, row = records["step", "gpt2-1.3b", 64, 0.0], "nvme/nvme overlapped"
    bounds, machine = large["bounds_s"][row], large["machine"]
    tokens = " or ".join(str(number) for number in sorted({record["arguments"]["tokens"] for record in small}))
    return (
        f"* gpt2-124m in bf16, {tokens} tokens a step, compared with plain PyTorch with everything in memory: "
        f"{_span(small, 'cpu/cpu barrier')}\n"
        f"  times as long with everything in host memory, and {_span(small, row)} times with everything on NVMe.\n"
        f"* gpt2-1.3b in bf16, {large['arguments']['tokens']} tokens a step, everything on NVMe: "
        f"{large['median'][row]:.2f} s, {large['ratios_to_bound'][row]:.2f} of its bound "
        f"({max(bounds, key=bounds.__getitem__)}),\n  on {machine['num_cpus']} cores of {machine['cpu']}.\n"
    )


def _span(records: list[dict[str, Any]], row: str) -> str:
    """The least and the most of plain PyTorch's time."""
    ratios = [record["ratios_to_plain"][row] for record in records if row in record["ratios_to_plain"]]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def render(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    order = sorted(records, key=lambda key: (list(TABLES).index(key[0]), *key[1:]))
    return "\n".join(TABLES[key[0]](records[key]) for key in order)


def head(record: dict[str, Any], title: str) -> str:
    machine = record["machine"]
    return (
        f"**{title}** ({machine['num_cpus']} cores of {machine['cpu']}, torch {record['versions'].get('torch')}, "
        f"commit {record['commit']})\n"
    )


def replace_between(markers: re.Pattern[str], made: str, text: str) -> str:
    return markers.sub(lambda found: found[1] + made + found[2], text)


def rows(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def step_table(record: dict[str, Any]) -> str:
    arguments, body = record["arguments"], []
    for name, seconds in record["median"].items():
        bounds = record["bounds_s"].get(name)
        result = record["results"][name]
        if "update_policy" not in result and name.split(",")[0] in RAN_AS_BARRIER:
            continue  # an older record, in which these rows name the policy that was asked for
        peak, busy = result["peak_rss_nbytes"], result["disk_busy"]
        body.append(
            [
                name,
                f"{seconds:.2f}",
                f"{record['ratios_to_plain'][name]:.2f}" if name in record["ratios_to_plain"] else "",
                f"{max(bounds.values()):.2f} ({max(bounds, key=bounds.__getitem__)})" if bounds else "",
                f"{record['ratios_to_bound'][name]:.2f}" if bounds else "",
                f"{busy:.0%}" if busy else "",
                f"{peak / (1 << 20):.0f}" if peak else "",
            ]
        )
    title = f"A step of {arguments['model']}, bf16, {arguments['tokens']} tokens, clipping {arguments['clip']:g}"
    columns = ["parameters/state, update", "s", "of plain", "bound s (by)", "of bound", "disk busy"]
    columns.append("peak MiB beyond imports")
    return head(record, title) + "\n" + rows(columns, body)


def update_table(record: dict[str, Any]) -> str:
    triad = record["rates_gb_per_s"]["triad"]
    body = [
        [name, f"{rate:.1f}", f"{rate / triad:.2f}", f"{record['median'][name]:.3f}"]
        for name, rate in record["rates_gb_per_s"].items()
        if name in record["median"]
    ]
    title = f"One AdamW update of {record['arguments']['numel'] >> 20} Mi parameters, bf16 gradients, 28 bytes each"
    return head(record, title) + "\n" + rows(["way", "GB/s", "of triad", "s"], body)


def optimizer_table(record: dict[str, Any]) -> str:
    """Each way beside what its ratios name."""
    held: dict[str, list[str]] = {}
    for names, ratio in record["ratios"].items():
        way, _, other = names.partition(" / ")
        held.setdefault(way, []).append(f"{ratio:.2f} of {other}")
    body = [[way, f"{seconds:.3f}", ", ".join(held.get(way, ()))] for way, seconds in record["median"].items()]
    title = f"A step of AdamW without an engine over {record['arguments']['numel'] >> 20} Mi fp32 parameters on the CPU"
    return head(record, title) + "\n" + rows(["state", "s", "held against"], body)


def activations_table(record: dict[str, Any]) -> str:
    """Each series with the memory that its step takes beyond the model."""
    arguments, peaks, moved = record["arguments"], record["peak_nbytes"], record["moved_nbytes"]
    cpu_s = record.get("cpu_s", {})
    ratios = {
        names.partition(" / ")[0]: (names.partition(" / ")[2], ratio) for names, ratio in record["ratios"].items()
    }
    body = []
    for way, seconds in record["median"].items():
        other, ratio = ratios.get(way, ("", 0.0))
        memory = f"{peaks[way] / 1e9:.2f}" if way in peaks else ""
        over_disk = f"{moved[way] / 1e9:.2f}" if way in moved else ""
        cpu = f"{cpu_s[way]:.2f}" if way in cpu_s else ""
        body.append([way, f"{seconds:.2f}", f"{ratio:.2f} of {other}" if other else "", cpu, memory, over_disk])
    title = (
        f"A step of {arguments['blocks']} transformer blocks, hidden size {arguments['hidden']}, "
        f"{arguments['batch'] * arguments['sequence']} tokens, fp32, on the CPU"
        + (", THP_MEM_ALLOC_ENABLE=1" if arguments.get("huge_pages") else "")
        + (f"; plain: {arguments['plain_blocks']} blocks" if "plain_blocks" in arguments else "")
    )
    return head(record, title) + "\n" + rows(["way", "s", "held against", "CPU, s", "memory, GB", "to disk, GB"], body)


def io_table(record: dict[str, Any]) -> str:
    body = [
        [name, f"{rate:.2f}", f"{record['ratio_to_fio'][name]:.2f}" if record["ratio_to_fio"].get(name) else ""]
        for name, rate in record["median"].items()
    ]
    return (
        head(record, "The disk, direct, each at its best block and depth")
        + "\n"
        + rows(["way", "GB/s", "of fio"], body)
    )


def checkpoint_table(record: dict[str, Any]) -> str:
    """A case that was not measured has no row."""
    shares = {
        name: f"{ratio:.2f} of fio's rate" for name, ratio in (record.get("ratios_to_fio") or {}).items() if ratio
    }
    if (to_bound := record.get("commit_to_bound")) is not None:
        shares["commit in place"] = f"{to_bound:.2f} of its bound"
    if (slowdown := record.get("async_slowdown")) is not None:
        shares["step while saving"] = f"{slowdown:+.0%} on a step alone"
    body = [[name, f"{seconds:.3f}", shares.get(name, "")] for name, seconds in record["median"].items()]
    nbytes = record.get("full_nbytes") or record.get("in_place_state_nbytes") or 0
    title = f"Checkpoints of {nbytes / 1e9:.2f} GB of fp32 masters and Adam's moments"
    return head(record, title) + "\n" + rows(["what", "s", "held against"], body)


def ranks_table(record: dict[str, Any]) -> str:
    arguments, body = record["arguments"], []
    for case, seconds in record["median"].items():
        result, ratio = record["results"][case], record["ratios_to_base"].get(case)
        payload, waited = result["payload"], result["waited"]
        body.append(
            [
                f"{case} {result['update_policy'] or result.get('version', '')}".strip(),
                f"{seconds:.3f}",
                f"{ratio:.2f} (at most {record['bars'][case]:.2f})" if ratio else "",
                "" if payload is None else f"{payload:.2f}",
                "" if waited is None else f"{waited:.0%}",
            ]
        )
    title = (
        f"A step of {arguments['model']} on {arguments['ranks']} ranks over gloo, fp32, {arguments['tokens']} tokens"
    )
    count = arguments["accumulation"]
    title += f" each, {count} micro-batch{'es' * (count > 1)} per step, clipping 1"
    columns = ["case", "s", "of torch's own", "payload, elements per parameter", "waited for others"]
    return head(record, title) + "\n" + rows(columns, body)


def auto_table(record: dict[str, Any]) -> str:
    """Measured steps next to predicted ones; of a setting, each next to the best by hand."""
    body = []
    for name, seconds in record["median"].items():
        setting, _, _ = name.rpartition(": ")
        by_hand = [
            own
            for other, own in record["median"].items()
            if setting and other.rpartition(": ")[0] == setting and not other.endswith(": auto")
        ]
        predicted = record["results"][name]["predicted_s"]
        of_best = f"{seconds / min(by_hand):.2f}" if by_hand else ""
        body.append([name, f"{seconds:.3f}", f"{predicted:.3f}", f"{predicted / seconds - 1:+.0%}", of_best])
    part, dtype = record["arguments"]["part"], record["arguments"].get("dtype", "bf16")
    title = (
        "Predicted steps, and what placement auto chooses"
        if part != "split"
        else "Predicted steps, nvme/nvme, 64 tokens"
    )
    return (
        head(record, f"{title}; {dtype}, clipping 1")
        + "\n"
        + rows(["case", "s", "predicted s", "error", "of the best by hand"], body)
    )


def deepspeed_table(record: dict[str, Any]) -> str:
    """DeepSpeed and tiered_zero with everything on one tier."""
    arguments = record["arguments"]
    body = [[f"{case} {record['deepspeed'][case]}", f"{seconds:.2f}"] for case, seconds in record["median"].items()]
    title = f"A step of {arguments['model']}, bf16, with everything on {arguments['tier']}"
    after = f"\nDeepSpeed takes {record['ratio']:.2f} times as long.\n"
    return head(record, title) + "\n" + rows(["case", "s"], body) + after


def step_seconds_table(record: dict[str, Any]) -> str:
    """Measured steps next to those that the plan predicts. tiny counts in no mean: its steps are Python."""
    body = [
        [
            name,
            f"{seconds:.3f}",
            f"{record['cells'][name]['predicted']['seconds']:.3f}",
            f"{record['errors'][name]:+.0%}",
        ]
        for name, seconds in record["median"].items()
    ]
    summary, arguments = record["summary"], record["arguments"]
    after = f"\nMean error of {summary['num']} cells {summary['mean']:.1%}, worst {summary['worst']:.0%}.\n"
    title = f"Predicted steps, {arguments.get('dtype', 'bf16')}, {arguments['tokens']} tokens a micro-batch"
    return (
        head(record, title)
        + "\n"
        + rows(["model, tier, clipping x micro-batches", "s", "predicted s", "error"], body)
        + after
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": step_table,
    "update": update_table,
    "optimizer": optimizer_table,
    "activations": activations_table,
    "io": io_table,
    "checkpoint": checkpoint_table,
    "ranks": ranks_table,
    "auto": auto_table,
    "step_seconds": step_seconds_table,
    "deepspeed": deepspeed_table,
}
"""Record name -> its table, in the page's order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    records = last_records()
    for page, markers, made in (
        (PAGE, MARKERS, render(records)),
        (PLACEMENT, PLACEMENT_MARKERS, headline(records)),
    ):
        text = page.read_text()
        new = replace_between(markers, made, text)
        if options.check and new != text:
            sys.exit(f"{page.name} differs from the records; run python tools/benchmark_tables.py")
        page.write_text(new)


if __name__ == "__main__":
    main()
