"""tools/fault_table.py: rows of both kinds become one table, and go between the marks of a document."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fault_table.py"
ROWS = [
    {"engine": "native", "access": "direct", "fault": "EIO", "case": "x", "came": "read of 4 at 7 of /a/b/data failed"},
    {"engine": "threads", "access": "direct", "fault": "EIO", "case": "x", "came": "read of 4 at 9 of /c/data failed"},
    {"fault": "a flip", "under": "barrier; nvme/cpu", "came": "raised in step()"},
    {"fault": "a flip", "under": "delayed; nvme/cpu", "came": "raised in forward()"},
]
TABLE = """| fault | under | what came of it |
|---|---|---|
| EIO | native, threads; direct | read of 4 at 7 of data failed |
| a flip | barrier, delayed; nvme/cpu | raised in forward() or step() |
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "io.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    (tmp_path / "runs").mkdir()
    for number, row in enumerate(ROWS[2:]):
        (tmp_path / f"runs/{number}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_one_line_a_fault(folder: Path) -> None:
    assert run("--folder", folder).returncode == 0
    assert (folder / "table.md").read_text() == TABLE


def test_it_goes_between_the_marks_as_often_as_wanted(folder: Path) -> None:
    document = folder / "README.md"
    document.write_text("before\n<!-- faults:begin -->\nold\n<!-- faults:end -->\nafter\n")
    for _ in range(2):
        assert run("--folder", folder, "--insert", document).returncode == 0
        assert document.read_text() == f"before\n<!-- faults:begin -->\n{TABLE}<!-- faults:end -->\nafter\n"


def test_a_document_without_marks_is_left_alone(folder: Path) -> None:
    document = folder / "README.md"
    document.write_text("text")
    done = run("--folder", folder, "--insert", document)
    assert done.returncode and "faults:begin" in done.stderr and document.read_text() == "text"


def test_no_rows(tmp_path: Path) -> None:
    assert "holds no rows" in run("--folder", tmp_path).stderr
