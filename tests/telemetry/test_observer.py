"""The record and the trace are written a step at a time; spans are kept only while somebody wants them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiered_zero.errors import ConfigError
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunObserver, read_run
from tiered_zero.telemetry.spans import Recorder

HEADER = RunHeader(model="gpt", num_parameters=10)


def take_steps(observer: RunObserver, recorder: Recorder, num_steps: int) -> list[bool]:
    """Whether spans were kept in each step."""
    kept = []
    for step in range(1, num_steps + 1):
        kept.append(recorder.keep_spans)
        recorder.add("compute", "forward", f"step {step}", float(step), step + 0.5)
        observer(StepReport(step=step, wall_s=1.0, seconds={}))
    return kept


def test_a_record_alone_keeps_no_spans(tmp_path: Path) -> None:
    recorder = Recorder()
    observer = RunObserver(recorder, HEADER, str(tmp_path / "run.jsonl"), None)
    assert not any(take_steps(observer, recorder, 5))
    observer.close()
    observer.close()
    run = read_run(tmp_path / "run.jsonl")
    assert run.end_save_s is not None and run.report.steps == 5


def test_a_trace_has_every_step_also_after_a_kill(tmp_path: Path) -> None:
    recorder = Recorder()
    observer = RunObserver(recorder, HEADER, None, str(tmp_path / "trace.json"))
    assert all(take_steps(observer, recorder, 4))
    text = (tmp_path / "trace.json").read_text()
    names = [event["name"] for event in json.loads(text.rstrip(",\n") + "]") if event["ph"] == "X"]
    assert names == [f"step {step}" for step in range(1, 5)]
    observer.close()
    observer.close()
    json.loads((tmp_path / "trace.json").read_text())


def test_without_files_no_spans_are_kept() -> None:
    recorder = Recorder()
    assert not any(take_steps(RunObserver(recorder, HEADER, None, None), recorder, 4))
    assert recorder.take_spans() == []


def test_a_trace_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiered_zero\.trace"):
        RunObserver(Recorder(), HEADER, str(tmp_path / "run.jsonl"), str(tmp_path / "absent" / "trace.json"))
