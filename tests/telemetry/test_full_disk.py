"""A disk that is full costs the record and the trace, with one warning each, and never a step."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest

from tests.support.faulty_runs import build, train
from tiered_zero.telemetry import runlog
from tiered_zero.telemetry.page import render_page
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunLog, TraceWriter, read_run
from tiered_zero.telemetry.spans import Span


class Disk:
    """`os` with room for so many bytes more."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        taken = min(self._room, len(data))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room -= taken
        return os.write(fd, data[:taken])


@pytest.mark.parametrize("room", [0, 1, 300, 1000])
def test_a_record_ends_after_a_whole_line_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "report.jsonl"
    log = RunLog(RunHeader(model="gpt", num_parameters=1), path)
    monkeypatch.setattr(runlog, "os", Disk(room))
    for step in range(1, 30):
        log.add(StepReport(step=step, wall_s=1.0, seconds={}))
    log.close()
    log.close()
    assert [text for text in caplog.messages if "cannot be written any more" in text] == caplog.messages
    assert len(caplog.messages) == 1 and str(path) in caplog.text and "No space left" in caplog.text
    run = read_run(path)
    assert run.end_save_s is None and len(run.steps) < 29
    assert [report.step for report in run.steps] == list(range(1, len(run.steps) + 1))
    assert "or its disk was full" in render_page(run, "a run")


@pytest.mark.parametrize("room", [0, 1, 300, 1000])
def test_a_trace_ends_after_a_whole_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    monkeypatch.setattr(runlog, "os", Disk(room))
    for step in range(30):
        trace.write([Span(lane="compute", name=f"step {step}", start_s=step, end_s=step + 0.5, nbytes=0, kind="")])
    trace.close()
    assert len(caplog.messages) == 1
    text = path.read_text()
    assert text in ("", "[\n") or json.loads(text.removesuffix(",\n") + "]"), "Perfetto needs no closing bracket"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this platform has no /dev/full")
def test_training_goes_on_where_neither_can_be_written(swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "tiered_zero"),
        build(swap_path, "overlapped", runtime={"report": "/dev/full", "trace": "/dev/full"}) as engine,
    ):
        assert train(engine, 2) is None
    cut = [text for text in caplog.messages if "/dev/full cannot be written any more" in text]
    assert len(cut) == 2 and {text.split(":")[0] for text in cut} == {"tiered_zero.report", "tiered_zero.trace"}
