"""Faults in whole training runs; what each gave is written where tools/fault_table.py reads it."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EnterRow = Callable[[str, str, str], None]


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """See `one_thread`."""


@pytest.fixture
def enter_row(request: pytest.FixtureRequest) -> Iterator[EnterRow]:
    """Enter (what was done to the run, under which settings, what came of it) into the table of faults.

    A test has a file of its own, so that parallel workers lose no row, and rows of tests that do not run stay.
    """
    rows: list[str] = []
    yield lambda fault, under, came: rows.append(json.dumps({"fault": fault, "under": under, "came": came}) + "\n")
    if rows:
        path = ROOT / "build/faults/runs" / (re.sub(r"\W+", "-", request.node.nodeid).strip("-") + ".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(rows))
