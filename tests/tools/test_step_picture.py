"""A step's timeline becomes a picture that stands alone."""

import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

from tests.support.models import ParityGPT, batch
from tests.support.native_build import ROOT
from tests.support.trainers import tiered, train


def draw(run: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/step_picture.py"), str(run), str(out)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def test_lanes_and_units_are_on_it(swap_path: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run.jsonl", tmp_path / "step.svg"
    with tiered(ParityGPT(), swap_path, runtime={"report": str(run)}) as engine:
        train(engine, batch, 4)
    ran = draw(run, out)
    assert ran.returncode == 0, ran.stderr
    words = {
        "".join(text.itertext()).strip() for text in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"compute", "fetch", "reduce", "update", "disk read", "disk write"} <= words


def test_a_run_without_steps_has_none(swap_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    tiered(ParityGPT(), swap_path, runtime={"report": str(run)}).close()
    ran = draw(run, tmp_path / "step.svg")
    assert ran.returncode == 2 and "holds no timeline" in ran.stderr


def test_four_rows_on_a_png(swap_path: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run.jsonl", tmp_path / "step.png"
    with tiered(ParityGPT(), swap_path, runtime={"report": str(run)}) as engine:
        train(engine, batch, 4)
    ran = draw(run, out)
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


def test_intervals(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from tools.step_picture import cut, without

    assert cut([(3, 5), (0, 2), (1, 2.5), (9, 11)], (1, 10)) == [(1, 2.5), (3, 5), (9, 10)]
    assert without([(0, 10), (12, 13)], [(1, 2), (4, 5), (9, 12.5)]) == [(0, 1), (2, 4), (5, 9), (12.5, 13)]
