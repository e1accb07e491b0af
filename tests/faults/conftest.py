"""Faults in whole training runs; what each gave goes to build/faults/runs.jsonl, and to the table beside it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "build/faults/runs.jsonl"
Tell = Callable[..., None]

_told: dict[str, list[dict[str, str]]] = {}
"""Test -> rows of the table."""


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """See `one_thread`."""


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Enter (what was done to the run, under which settings, what came of it) into the table of faults."""
    rows = _told.setdefault(request.node.nodeid, [])

    def enter(fault: str, under: str, came: str) -> None:
        rows.append({"test": request.node.nodeid, "fault": fault, "under": under, "came": came})

    return enter


def pytest_sessionfinish() -> None:
    """Rows of tests that did not run this time stay as they were."""
    if not _told:
        return
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    before = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    rows = [row for row in before if row["test"] not in _told]
    rows += [row for found in _told.values() for row in found]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run([sys.executable, str(ROOT / "tools/fault_table.py")], check=True, stdout=subprocess.DEVNULL)
