"""A run's record can be read back, whole or cut off at any byte."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from pathlib import Path

import pytest

from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunLog, read_run

HEADER = RunHeader(
    model="gpt",
    num_parameters=1000,
    planned_nbytes={"device": {"parameters": 5, "window": 3}},
    facts={"engine": "threads"},
)
STEPS = [StepReport(step=step, wall_s=1.0, seconds={"forward": 1.0}, loss=5.0 / step, tokens=8) for step in (1, 2, 3)]


def write_run(path: Path) -> None:
    with closing(RunLog(HEADER, path)) as log:
        log.add(STEPS[0])
        log.add(STEPS[1])
        log.add(STEPS[2])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_run(path)
    run = read_run(path)
    assert run.header == HEADER
    assert run.steps == STEPS
    assert run.end_save_s == 0 and run.report.planned_nbytes == {"device": 8}
    assert run.report.last_loss == pytest.approx(5 / 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [json.loads(line)["record"] for line in path.read_text().splitlines()][0::4] == ["header", "footer"]


def test_a_file_that_is_there_is_kept_under_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("of a run that is resumed")
    write_run(path)
    write_run(path)
    assert (tmp_path / "run-1.jsonl").read_text() == "of a run that is resumed"
    assert read_run(tmp_path / "run-2.jsonl").steps == read_run(path).steps == STEPS
    assert caplog.messages == [
        f"tiered_zero.report: {path} was there already; it is {tmp_path / name} now"
        for name in ("run-1.jsonl", "run-2.jsonl")
    ]


def test_a_run_cut_off_anywhere_keeps_its_whole_lines(tmp_path: Path) -> None:
    path, cut = tmp_path / "run.jsonl", tmp_path / "cut.jsonl"
    write_run(path)
    data = path.read_bytes()
    header_end = data.index(b"\n") + 1
    for length in range(header_end, len(data), 7):
        cut.write_bytes(data[:length])
        run = read_run(cut)
        assert run.steps == STEPS[: len(run.steps)]
        assert run.report.steps == len(run.steps)
    cut.write_bytes(data[: header_end - 1])
    with pytest.raises(StoreError, match="holds no run"):
        read_run(cut)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        "{",
        "{}",
        '{"record": "step"}',
        '{"record": "header"}',
        "\u2028",
    ],
)
def test_another_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "other"
    header = json.dumps({"record": "header", "model": "m", "num_parameters": 1})
    path.write_text(f"{header}\n{line}\n", encoding="utf-8")
    with pytest.raises(StoreError, match="line 2"):
        read_run(path)


def test_a_line_of_another_version_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_run(path)
    header, *lines = path.read_text().splitlines(keepends=True)
    timeline = {"record": "timeline", "step": 3, "spans": [["compute", "forward", 1.0, 2.0, 0, "forward"]]}
    path.write_text("".join((header, json.dumps(timeline), "\n", *lines)))
    assert read_run(path).steps == STEPS


def test_a_step_before_the_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text(json.dumps({"record": "step", **STEPS[0].to_json()}) + "\n")
    with pytest.raises(StoreError, match="no header before it"):
        read_run(path)


def test_a_file_that_cannot_be_read_or_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        read_run(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match="cannot be read"):
        read_run(tmp_path / "binary")
    with pytest.raises(ConfigError, match=r"tiered_zero\.report: expected a file"):
        RunLog(HEADER, tmp_path / "absent" / "run.jsonl")
