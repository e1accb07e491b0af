"""First contact with a GPU's machine: wheels that were carried there, and one command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.native_build import ROOT


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from tools.acceptance import carried

    return carried


def normal(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_names_are_those_of_the_project_and_of_what_these_need(carried: ModuleType) -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("]\n")[0]
    needed = {normal(line) for line in re.findall(r'"(.+)"', section)} - {"torch"} | {"pytest"}
    left = list(needed)
    while left:
        try:
            wanted = {normal(line) for line in requires(left.pop()) or () if "extra ==" not in line}
        except PackageNotFoundError:
            continue
        here = {name for name in wanted if name not in ("colorama", "exceptiongroup", "tomli")}  # other systems'
        left += here - needed
        needed |= here
    assert needed == set(carried.NAMES)


def make_wheel(folder: Path, name: str, module: str) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")


def test_a_wheel_is_unpacked_where_the_module_is_missing(
    carried: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    monkeypatch.setattr(carried, "NAMES", ("click", "not-here", "not-there"))
    arguments = [str(tmp_path / "site"), str(tmp_path / "nowhere"), str(tmp_path / "wheels")]
    make_wheel(tmp_path / "wheels", f"not_here-1.0-{own}-{own}-manylinux2014_x86_64.whl", "not_here")
    make_wheel(tmp_path / "wheels", "not_there-1.0-cp26-cp26-manylinux2014_x86_64.whl", "not_there")
    assert carried.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "lacks not-there." in printed and re.search(r"pip download .* -d wheels not-there\n", printed)
    make_wheel(tmp_path / "wheels", "not_there-1.0-py3-none-any.whl", "not_there")
    assert carried.main(arguments) == 0
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"not_here", "not_there"}


@pytest.mark.slow
def test_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sections but one are over already: it goes on from their results."""
    monkeypatch.syspath_prepend(ROOT)
    from tools import gpu_acceptance

    earlier, out = tmp_path / "earlier.jsonl", tmp_path / "out"
    names = [section.name for section in gpu_acceptance.sections(smoke=True) if section.name != "pytest -m gpu"]
    earlier.write_text("".join(json.dumps({"section": name, "passed": True}) + "\n" for name in names))
    command = [str(ROOT / "tools/gpu_contact.sh"), "--smoke", "--from", str(earlier), "--out", str(out)]
    ran = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 failed, 0 sections left" in ran.stdout and "pytest -m gpu" in (out / "summary.md").read_text()
    unknown = subprocess.run([*command, "--unknown"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "--wheels DIR" in unknown.stderr
