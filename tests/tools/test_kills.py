"""tools/kills.py: a round is recorded, and the table of records goes between the marks of a document."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import run_forked

TOOL = Path(__file__).resolve().parents[2] / "tools" / "kills.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_forked(TOOL, *arguments)


def record(case: str, num_kills: int | None) -> dict[str, Any]:
    killed = {"num_kills": num_kills, "num_in_save": 2, "num_steps": 100, "num_repeated": 5}
    arguments = {"case": case, "kills": 30, "seed": 0}
    failure = "" if num_kills else "other bits at step 7"
    return {"name": "kills", "arguments": arguments, "killed": killed if num_kills else None, "failure": failure}


def test_the_table_counts_what_was_done_and_hides_no_failure(tmp_path: Path) -> None:
    records, document = tmp_path / "kills.jsonl", tmp_path / "page.md"
    rows = [record("a", 30), record("b", 10), record("a", 29), record("b", None)]
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document.write_text("before\n<!-- kills:begin -->\nold\n<!-- kills:end -->\nafter\n")
    done = run("--insert", document, "--out", records)
    assert done.returncode == 0, done.stderr
    lines = document.read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("before", "after", 8)
    good = "each went on, and ended with the bits of the run that was never killed"
    assert lines[4] == f"| a | 59 | 4 | 200 | {good} |"
    assert lines[5] == "| b | 10 | 2 | 100 | 1 of 2 rounds failed: other bits at step 7 |"


def test_a_round_is_recorded(tmp_path: Path, swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOL.parents[1])
    tool = importlib.import_module("tools.kills")
    out = tmp_path / "kills.jsonl"
    assert tool.main(["--kills", "2", "--dir", str(swap_path), "--out", str(out)]) == 0
    (found,) = map(json.loads, out.read_text().splitlines())
    assert found["arguments"] == {"case": "overlapped, fp32, nvme", "kills": 2, "seed": 0}
    assert found["killed"]["num_kills"] == 2 and not found["failure"]
    assert [*swap_path.iterdir()] == []
