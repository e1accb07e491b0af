"""A step of a trace becomes a picture that stands alone."""

import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.models import ParityGPT, batch
from tests.support.native_build import ROOT
from tests.support.trainers import tiered, train
from tiered_zero.telemetry.report import CAUSES
from tiered_zero.telemetry.runlog import TraceWriter
from tiered_zero.telemetry.spans import LANES, Span


def draw(trace: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/step_picture.py"), str(trace), str(out)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def test_lanes_and_units_are_on_it(swap_path: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "step.svg"
    with tiered(ParityGPT(), swap_path, runtime={"trace": str(trace)}) as engine:
        train(engine, batch, 4)
    ran = draw(trace, out)
    assert ran.returncode == 0, ran.stderr
    words = {
        "".join(text.itertext()).strip() for text in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"compute", "fetch", "reduce", "update", "disk read", "disk write"} <= words


def test_a_run_without_steps_has_none(swap_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    tiered(ParityGPT(), swap_path, runtime={"trace": str(trace)}).close()
    ran = draw(trace, tmp_path / "step.svg")
    assert ran.returncode == 2 and "does not have step 3" in ran.stderr


def test_four_rows_on_a_png(swap_path: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "step.png"
    with tiered(ParityGPT(), swap_path, runtime={"trace": str(trace)}) as engine:
        train(engine, batch, 4)
    ran = draw(trace, out)
    assert ran.returncode == 0, ran.stderr
    width, lines = read_png(out)
    assert width == len(lines[0]) // 3 == 1600
    colours = {line[at : at + 3] for line in lines for at in range(0, len(line), 3)}
    assert {bytes((46, 125, 80)), bytes((40, 44, 52))} <= colours  # compute, at full; letters


def read_png(path: Path) -> tuple[int, list[bytes]]:
    """Width, and the lines of one without filters."""
    data, chunks, at = path.read_bytes(), {}, 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        assert zlib.crc32(data[at + 4 : at + 8 + size]) == struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        chunks[kind] = data[at + 8 : at + 8 + size]
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw, stride = zlib.decompress(chunks[b"IDAT"]), 3 * width + 1
    assert len(raw) == stride * height
    return width, [raw[line * stride + 1 : (line + 1) * stride] for line in range(height)]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from tools import step_picture

    return step_picture


def test_a_killed_run_has_the_steps_that_it_made(tool: ModuleType, tmp_path: Path) -> None:
    trace, out = TraceWriter(tmp_path / "trace.json"), tmp_path / "step.svg"
    for start_s in (10.0, 20.0):
        trace.write(
            [
                Span(lane="compute", name="forward", start_s=start_s, end_s=start_s + 8, kind="forward"),
                Span(lane="compute", name="step", start_s=start_s + 8, end_s=start_s + 9, kind="step"),
                Span(lane="disk read", name="<a>", start_s=start_s - 8, end_s=start_s + 2, nbytes=1024, kind="read"),
                Span(lane="disk read", name="too long", start_s=start_s + 2, end_s=start_s + 2.1, kind="read"),
                Span(lane="update", name="outer", start_s=start_s, end_s=start_s + 9.5, kind="update"),
                Span(lane="update", name="inner", start_s=start_s + 0.01, end_s=start_s + 9, kind="update"),
                Span(lane="update", name="late", start_s=start_s + 1, end_s=start_s + 2, kind="wait_state"),
            ]
        )
    spans = tool.read_trace(tmp_path / "trace.json")
    assert [tool.step_window(spans, step) for step in range(4)] == [None, (2, 19), (19, 29), None]
    tool.draw_svg(spans, (19.0, 29.0), out)
    svg = out.read_text()
    ElementTree.fromstring(svg)
    assert "<title>disk read: &lt;a&gt; (read), 3e+03 ms, 1.0 KiB</title>" in svg, "from the start of the step on"
    names = re.findall(r'class="inside".*>(.+)</text>', svg)
    assert names == ["forward", "step", "outer", "inner", "&lt;a&gt;", "late"], "the first outer is that of step 1"
    rows = tool.rows_of(spans, (19.0, 29.0))
    assert rows == {"compute": [(20, 29)], "H2D": [], "D2H": [], "update": [(19, 19.5), (20, 21), (22, 29)]}


def test_every_lane_and_cause_has_a_colour(tool: ModuleType) -> None:
    assert {*CAUSES, *LANES} <= tool.PALETTE.keys()


def test_intervals(tool: ModuleType) -> None:
    cut, without = tool.cut, tool.without
    assert cut([(3, 5), (0, 2), (1, 2.5), (9, 11)], (1, 10)) == [(1, 2.5), (3, 5), (9, 10)]
    assert without([(0, 10), (12, 13)], [(1, 2), (4, 5), (9, 12.5)]) == [(0, 1), (2, 4), (5, 9), (12.5, 13)]
