"""`tiered-zero report RUN` writes one page beside the record, and refuses what is none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from tiered_zero.cli.main import main
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunLog


@pytest.fixture
def record(tmp_path: Path) -> Path:
    with closing(RunLog(RunHeader(model="gpt", num_parameters=10), tmp_path / "run.jsonl")) as log:
        log.add(StepReport(step=1, wall_s=1.0, seconds={"other": 1.0}, loss=5.0))
    return tmp_path / "run.jsonl"


def test_the_page_lies_beside_the_record(record: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(record)])
    assert result.exit_code == 0 and result.stdout == f"{record.with_suffix('.html')}\n"
    assert "5.000" in record.with_suffix(".html").read_text()


def test_the_page_can_go_elsewhere_but_not_onto_the_record(record: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["report", str(record), "--out", str(tmp_path / "page")]).exit_code == 0
    assert (tmp_path / "page").read_text().startswith("<!doctype html>")
    before = record.read_bytes()
    result = CliRunner().invoke(main, ["report", str(record), "--out", str(record)])
    assert result.exit_code == 2 and record.read_bytes() == before
    result = CliRunner().invoke(main, ["report", str(record), "--out", str(tmp_path / "absent" / "page")])
    assert result.exit_code == 1 and "cannot be written" in result.stderr


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a run\n")
    result = CliRunner().invoke(main, ["report", str(tmp_path / "text")])
    assert result.exit_code == 1 and "line 1" in result.stderr
    assert not (tmp_path / "text.html").exists()
    assert CliRunner().invoke(main, ["report", str(tmp_path / "absent")]).exit_code == 2
