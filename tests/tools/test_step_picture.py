"""A step's timeline becomes a picture that stands alone."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
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
