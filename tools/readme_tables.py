"""Write the README's tables of measurements from the benchmark records, so that no figure in it is typed by hand.

    python tools/readme_tables.py            # rewrite README.md between its markers
    python tools/readme_tables.py --check    # exit 1 where README.md differs from the records

The last record of each name in records/*.jsonl counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tools" / "bench" / "records"
MARKERS = re.compile(r"(<!-- records:begin -->\n).*?(<!-- records:end -->)", re.DOTALL)


def last_records() -> dict[str, dict[str, Any]]:
    records = {}
    for path in sorted(RECORDS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            records[record["name"]] = record
    return records


def render(records: dict[str, dict[str, Any]]) -> str:
    parts = [table for name, table in TABLES.items() if name in records for table in [table(records[name])]]
    return "\n".join(parts)


def head(record: dict[str, Any], title: str) -> str:
    machine = record["machine"]
    return (
        f"**{title}** ({machine['num_cpus']} cores of {machine['cpu']}, torch {record['versions'].get('torch')}, "
        f"commit {record['commit']})\n"
    )


def rows(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


TABLES: dict[str, Any] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = MARKERS.sub(lambda found: found[1] + render(last_records()) + found[2], text)
    if options.check and new != text:
        sys.exit("README.md differs from the records; run python tools/readme_tables.py")
    readme.write_text(new)


if __name__ == "__main__":
    main()
