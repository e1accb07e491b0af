"""What the records of an acceptance amount to, as a page for a reader who was not there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.acceptance.report import Record

COMPARED = "1.3b tiered cpu/cpu"
GIB = 1 << 30


def write(path: Path, records: dict[str, Record], names: list[str]) -> None:
    """`names`: of all sections, those that are left too."""
    parts = [*_head(records, names), *_compared(records), *_steps(records), *_device(records), *_left_out(records)]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _head(records: dict[str, Record], names: list[str]) -> Iterable[str]:
    machine, links = records.get("machine", {}), records.get("links", {})
    left = [name for name in names if name not in records]
    failed = [name for name, record in records.items() if record["passed"] is False]
    devices = ", ".join(machine.get("device", ())) or "no accelerator"
    simulated = " (simulated: times mean nothing)" * bool(machine.get("simulated"))
    passed = sum(record["passed"] is True for record in records.values())
    yield f"# tiered_zero {machine.get('tiered_zero', '')} on {devices}{simulated}\n"
    yield f"{passed} checks passed, {len(failed)} failed, {len(left)} sections left to run.\n"
    for name in failed:
        found = {
            key: value for key, value in records[name].items() if key not in ("section", "passed", "time", "took_s")
        }
        yield f"* FAILED: {name}: {str(found)[:300]}"
    yield f"\n* torch {machine.get('torch')}, {machine.get('accelerator')}, Python {machine.get('python')}"
    rate = machine.get("update_parameters_per_s", 0.0)
    threads = f" on {machine['kernel_threads']} threads" if "kernel_threads" in machine else ""
    yield f"* update kernel: {machine.get('kernel')}{threads}, {rate / 1e9:.2f} G parameters/s"
    direct = "O_DIRECT" if machine.get("direct_io") else "buffered"
    yield f"* disk: {machine.get('io_engine')} engine, {direct}, {_rates(links, 'read', 'write')}"
    yield f"* copies: {_rates(links, 'h2d', 'd2h', 'both', 'pageable_h2d')}; memory {_rates(links, 'triad')}"
    courses = [record for name, record in records.items() if name.startswith("parity ")]
    if courses:
        good = sum(record["passed"] is True for record in courses)
        bits = sum(bool(record.get("compared_bits")) for record in courses)
        yield f"* parity with plain PyTorch: {good} of {len(courses)} courses, {bits} of them bit for bit"


def _rates(links: Record, *names: str) -> str:
    return ", ".join(f"{name} {links.get(f'{name}_bytes_per_s', 0.0) / 1e9:.1f} GB/s" for name in names)


def _compared(records: dict[str, Record]) -> Iterable[str]:
    """Losses side by side."""
    found = {
        name: record["losses"]
        for name, record in records.items()
        if name.startswith("1.3b ") and len(record.get("losses", ())) > 5
    }
    if COMPARED not in found:
        return
    yield "\n## The same values and batches in each\n"
    yield from _table(
        ["step", *(name.removeprefix("1.3b ") for name in found)],
        (
            [index + 1, *(f"{losses[index]:.6f}" if index < len(losses) else "" for losses in found.values())]
            for index in range(max(map(len, found.values())))
        ),
    )
    yield ""
    for name, losses in found.items():
        apart = max(abs(one - other) for one, other in zip(losses, found[COMPARED], strict=False))
        if name != COMPARED:
            yield f"* {name}: at most {apart:.2g} from {COMPARED}"


def _steps(records: dict[str, Record]) -> Iterable[str]:
    rows = []
    for name, record in records.items():
        if "tokens_per_s" in record:
            bounds = record.get("bounds_s", {})
            largest = max(bounds, key=lambda key: bounds[key]) if bounds else ""
            rows.append([
                name, f"{record['median_s']:.3f}", f"{record['tokens_per_s']:.0f}",
                f"{100 * record['compute_part']:.0f}%" if "compute_part" in record else "",
                f"{record['times_bound']:.2f} {largest}" if record.get("times_bound") else "",
                f"{record['memory']['active'] / GIB:.1f}" if record.get("memory") else "",
            ])  # fmt: skip
    if rows:
        yield "\n## Seconds of a step (median)\n"
        yield from _table(["", "s", "tokens/s", "% of compute", "times the bound", "GiB on the device"], rows)


def _device(records: dict[str, Record]) -> Iterable[str]:
    for name in ("largest model", "largest model in 24 GiB"):
        if "layers" in (record := records.get(name, {})):
            size = f"{record['num_parameters'] / 1e9:.2f} G parameters in {record['layers']} layers"
            yield f"\n{name}: {size}, {record['placement']}; steps took {_seconds(record['seconds'])}"
    if "busy_part" in (record := records.get("profile", {})):
        hidden = ", ".join(f"{name} {100 * part:.0f}%" for name, part in record["copies_hidden_part"].items())
        yield "\n## One step\n"
        yield f"{record['wall_s']:.3f} s; compute is busy for {100 * record['busy_part']:.0f}% of it; "
        yield f"of the copies' time compute hides {hidden} (by {record['times']}).\n\n![one step](step.png)"


def _seconds(values: list[float]) -> str:
    return " and ".join(f"{value:.1f} s" for value in values)


def _left_out(records: dict[str, Record]) -> Iterable[str]:
    found = {name: record["left_out"] for name, record in records.items() if record.get("left_out")}
    if found:
        yield "\n## Left out\n"
        yield from (f"* {name}: {why}" for name, why in found.items())


def _table(head: list[str], rows: Iterable[list[Any]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
