"""The table of the faults that the tests tried and what each gave, from the files under build/faults.

    python tools/fault_table.py                           writes build/faults/table.md
    python tools/fault_table.py --insert docs/faults.md   and puts it between its markers

The rows are written by the tests: faults of system calls under each I/O engine (tests/io/test_faults.py; one file), and
faults under whole training runs (tests/faults; one file a test, so that parallel workers share none). Remove
build/faults and run both for a table without rows of tests that are gone. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "faults"
BEGIN, END = "<!-- faults:begin -->", "<!-- faults:end -->"
MAX_CAME = 150
CALL = re.compile(r"raised in (\w+\(\))")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Every line of every file below `folder`, files by name. Rows of the engines' tests get the form of the others."""
    rows = [json.loads(line) for file in sorted(folder.rglob("*.jsonl")) for line in file.read_text().splitlines()]
    return [{**row, "under": f"{row['engine']}; {row['access']}"} if "engine" in row else row for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; one line a fault, with everything under which it was tried and every outcome once."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(row["fault"], []).append(row)
    text = "| fault | under | what came of it |\n|---|---|---|\n"
    for fault, found in lines.items():
        came = outcomes([plain(row["came"]) for row in found])
        text += f"| {fault} | {joined([row['under'] for row in found])} | {came} |\n"
    return text


def outcomes(came: list[str]) -> str:
    """Each once, whatever the numbers in it; those that differ in the call that raised are one."""
    first = {re.sub(r"\d+", "#", text): text for text in reversed(came)}
    calls: dict[str, list[str]] = {}
    for text in reversed(first.values()):
        found = CALL.search(text)
        calls.setdefault(CALL.sub("raised in {}", text), []).append(found[1] if found else "")
    return " / ".join(text.replace("{}", " or ".join(sorted(names))) for text, names in calls.items())


def joined(unders: list[str]) -> str:
    """["native; direct", "native; buffered"] -> "native; direct, buffered"."""
    columns: list[dict[str, None]] = []
    for under in unders:
        for place, part in enumerate(under.split("; ")):
            columns += [{}] * (place == len(columns))
            columns[place] = {**columns[place], part: None}
    return "; ".join(", ".join(column) for column in columns)


def plain(came: str) -> str:
    """One short line: paths without their directories, no free space of the day, no digits that differ by run."""
    text = re.sub(r"/?(?:[\w.-]+/)+(?=[\w.-])", "", came.splitlines()[0] if came else "")
    text = re.sub(r"; [\d.]+ [KMGT]iB free there", "", text)
    text = re.sub(r"faulty-\w+-(?:True|False)-", "", text).replace("|", "\\|")
    return text if len(text) <= MAX_CAME else text[: MAX_CAME - 3].rstrip() + "..."


def insert(document: str, text: str) -> str:
    """Raises ValueError where the document does not have both marks, in order."""
    begin, end = document.find(BEGIN), document.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"expected {BEGIN} and after it {END}; add them where the table is to stand")
    return f"{document[: begin + len(BEGIN)]}\n{text}{document[end:]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the rows are, and the table goes")
    parser.add_argument("--insert", type=Path, metavar="DOCUMENT", help="a document with the two marks")
    options = parser.parse_args(arguments)
    rows = read_rows(options.folder)
    if not rows:
        sys.exit(f"{options.folder} holds no rows; run pytest tests/io/test_faults.py tests/faults first")
    text = table(rows)
    (options.folder / "table.md").write_text(text)
    if options.insert:
        try:
            options.insert.write_text(insert(options.insert.read_text(), text))
        except ValueError as error:
            sys.exit(f"{options.insert}: {error}")
    print(f"{len(rows)} rows: {options.folder / 'table.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
