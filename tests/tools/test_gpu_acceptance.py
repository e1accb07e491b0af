"""The acceptance of a GPU runs whole where there is none, on the lagging device or the CPU, and what fails shows."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from tests.support.forked import run_forked
from tests.support.native_build import ROOT

FORKS_SECTIONS = """
import os, sys
from tools import gpu_acceptance

def run_child(command, timeout_s):
    if (pid := os.fork()) == 0:
        os._exit(gpu_acceptance.main(command[2:]))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

listed, left_out = gpu_acceptance.sections, sys.argv[2].split(";")
gpu_acceptance.run_child = run_child
gpu_acceptance.SMOKE_COURSES = int(sys.argv[1])
gpu_acceptance.sections = lambda smoke: [section for section in listed(smoke) if section.name not in left_out]
sys.exit(gpu_acceptance.main(sys.argv[3:]))
"""


STARTS_PROCESSES = ("exit without close()", "two ranks: training")
"""Sections that start processes of their own, which import torch."""

REPEATED = (
    "7b ",
    "3b ",
    "compute 7b",
    "compute 3b",
    "1.3b clip",
    "1.3b 1 row",
    "compute 1.3b 1 row",
    "an exception in",
)
"""What these sections begin with runs the same code as another one, with other sizes."""


def is_left_out(name: str) -> bool:
    return name in STARTS_PROCESSES or name == "largest model" or name.startswith(REPEATED)


def accept(out: Path, swap_path: Path, whole: bool, names: list[str]) -> subprocess.CompletedProcess[str]:
    """The process of its sections is forked from its own. `whole`: all of them, and four courses of each group."""
    what = (4, "") if whole else (1, ";".join(filter(is_left_out, names)))
    return run_forked("-c", FORKS_SECTIONS, *what, "--smoke", "--out", out, "--dir", swap_path)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from tools import gpu_acceptance

    return gpu_acceptance


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_smoke(tool: ModuleType, swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    monkeypatch.setattr(tool, "SMOKE_COURSES", 4 if whole else 1)
    listed = [each.name for each in tool.sections(smoke=True)]
    names = [name for name in listed if whole or not is_left_out(name)]
    out = tmp_path / "out"
    ran = accept(out, swap_path, whole, listed)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = read(out)
    assert [line["section"] for line in lines] == names
    assert {line["passed"] for line in lines} == {None, True} and list(swap_path.iterdir()) == []
    found = {line["section"]: line for line in lines}
    courses = [name for name in found if name.startswith("parity ")]
    assert all(
        found[name]["passed"]
        for name in (*courses, "one step", "memory", "a checkpoint", *STARTS_PROCESSES[1:] * whole)
    )
    assert found["1.3b FSDP2 offload"]["losses"] == pytest.approx(found["1.3b tiered cpu/cpu"]["losses"], abs=1e-3)
    assert {path.name for path in out.iterdir()} == {"results.jsonl", "summary.md", "step.png", "trace.json.gz"}
    summary = (out / "summary.md").read_text()
    assert "| 1 | 4." in summary and "1.3b torchao offload: " in summary and "0 failed" in summary
    # called again it trains a course that is missing, and says what has failed
    kept = [line for line in lines if line["section"] != courses[-1]]
    kept.append({"section": courses[0], "passed": False, "other_than_plain": ["x"]})
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"section": "cut o')
    again = accept(out, swap_path, whole, listed)
    assert again.returncode == 1 and f"1 failed, 0 sections left\n  {courses[0]}" in again.stdout
    lines = (out / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["section"] for line in lines[len(kept) + 1 :]] == [courses[-1]]


def test_the_first_courses_cover_all_pairs_of_settings(tool: ModuleType) -> None:
    from tests.support.pairwise import pairs_of
    from tools.acceptance import correctness

    def pairs(courses: list[Any]) -> set[Any]:
        names = ("placement", "update", "clip", "accumulation", "bf16")
        return set().union(*(pairs_of({name: getattr(course, name) for name in names}) for course in courses))

    first, every = correctness.first_courses(), correctness.all_courses()
    assert len(first) == 12 and len(every) == 80 and set(first) < set(every) and pairs(first) == pairs(every)
    names = [section.name for section in tool.sections()]
    assert names.index("profile") < names.index(f"parity {first[0].name}") < names.index("7b cpu/cpu clip 1.0")
    rest = [course for course in every if course not in first]
    assert names.index("7b cpu/cpu clip 1.0") < names.index(f"parity {rest[0].name}")


def run_fakes(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, does: dict[str, Any], minutes: float = 10
) -> int:
    """`does`: section -> whether it passes, or the exit code of its process (None: it is stopped)."""
    from tools.acceptance.report import Section, write_record

    def run_child(command: list[str], timeout_s: float) -> int | None:
        for name in (value for option, value in pairwise(command) if option == "--section"):
            if not isinstance(does[name], bool):
                return does[name]
            write_record(out / "results.jsonl", name, {"passed": does[name]})
        return 0

    sections = [Section(name=name, group="one", run=lambda site: {}) for name in does]
    monkeypatch.setattr(tool, "sections", lambda smoke: sections)
    monkeypatch.setattr(tool, "run_child", run_child)
    arguments = ["--out", str(out), "--dir", str(out), "--minutes", str(minutes), "--without-kernels"]
    out.mkdir(exist_ok=True)
    return int(tool.main(arguments))


def test_a_process_that_ends_takes_one_section_along(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run_fakes(tool, monkeypatch, tmp_path / "out", {"a": True, "crash": -11, "hang": None, "b": True}) == 1
    found = {line["section"]: line for line in read(tmp_path / "out")}
    assert {name: line["passed"] for name, line in found.items()} == dict(a=True, crash=False, hang=False, b=True)
    assert "-11" in found["crash"]["error"] and "had not ended" in found["hang"]["error"]


def test_what_has_no_time_is_left_to_the_next_call(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fakes(tool, monkeypatch, tmp_path / "out", {"a": True}, minutes=-1) == 0
    assert "1 sections left" in capsys.readouterr().out and not (tmp_path / "out/results.jsonl").exists()


def test_it_stops_without_compiled_libraries_unless_asked(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))
    with pytest.raises(SystemExit):
        tool.main(["--out", str(tmp_path / "out")])
    assert "no library _update, _direct_io" in capsys.readouterr().err and not (tmp_path / "out").exists()


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_that_outlasts_its_time_ends_with_all_it_started(tool: ModuleType, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid}.part; mv {pid}.part {pid}; wait"

    for timeout_s in (0.2, 2.0, 20.0):  # as long as a busy machine needs to start it
        assert tool.run_child(["sh", "-c", script], timeout_s) is None
        if pid.exists():
            break
    deadline_s = time.monotonic() + 60  # a signal acts when the process runs next
    while not has_ended(int(pid.read_text())) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert has_ended(int(pid.read_text()))


@pytest.mark.parametrize(("raised", "passed"), [("OutOfMemoryError", True), ("", False), ("RuntimeError", False)])
def test_running_out_of_memory_has_to_raise(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: str, passed: bool
) -> None:
    from tools.acceptance import correctness
    from tools.acceptance.report import Site

    monkeypatch.setattr(correctness, "left_alone", lambda site: {})
    monkeypatch.setattr(correctness, "interrupted", lambda site: contextlib.nullcontext((None, tmp_path)))
    monkeypatch.setattr(correctness, "take_steps", lambda *args: None)
    monkeypatch.setattr(correctness, "weights_of", lambda engine: {})
    monkeypatch.setattr(correctness, "_run_out_of_memory", lambda site, engine: raised)
    site = Site(device=torch.device("cuda", 0), directory=tmp_path, out=tmp_path)
    assert correctness.survive_out_of_memory(site)["passed"] is passed


def test_a_course_in_bf16_is_held_against_the_kernels_square_root(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, swap_path: Path, tmp_path: Path
) -> None:
    """MKL's, which torch takes, gives other bits here after four steps of four layers."""
    from tools.acceptance import correctness
    from tools.acceptance.model import SIZES, Course
    from tools.acceptance.report import Site

    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], layers=4))
    site = Site(device=torch.device("cpu"), directory=swap_path, out=tmp_path, smoke=True)
    record = correctness.check_parity(site, Course(placement="cpu/cpu", update="barrier", clip=0.3, bf16=True))
    assert record["passed"] and record["compared_bits"] and not record["other_than_plain"]


def test_a_record_has_no_folders_and_no_host_name(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.acceptance import report

    monkeypatch.setattr(report.platform, "node", lambda: "alpha17")
    found = report.without_names({"errors": ['File "/home/me/x.py", line 3 on alpha17', 7], "name": "cpu/nvme 3/s"})
    assert found == {"errors": ['File "x.py", line 3 on HOST', 7], "name": "cpu/nvme 3/s"}


def test_times_of_a_profile(tool: ModuleType) -> None:
    from tools.acceptance.profile import device_times, hidden_part

    events = [
        {"cat": "kernel", "name": "gemm", "ts": 1e6, "dur": 2e6},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 2e6, "dur": 4e6},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1.5e6, "dur": 1e6},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e6},
    ]
    kernels, copies = device_times(events, 10.0)
    assert (kernels, copies) == ([(11.0, 13.0)], {"H2D": [(12.0, 16.0)], "D2H": [(11.5, 12.5)]})
    assert hidden_part(copies["H2D"], kernels) == 0.25 and hidden_part(copies["D2H"], kernels) == 1.0
