"""The distribution `deepspeed` on disk: written, found by that name, refused next to the real one, and removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tiered_zero.cli.main import main
from tiered_zero.deepspeed import __version__ as VERSION


def call(command: str, target: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["deepspeed-alias", command, "--target", str(target)])
    return done.exit_code, done.output


def run(code: str, target: Path) -> str:
    path = os.pathsep.join((str(target), os.environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, text=True, stdout=subprocess.PIPE
    )
    assert done.returncode == 0
    return done.stdout.strip()


def test_install_status_uninstall(tmp_path: Path) -> None:
    (tmp_path / "other.py").touch()
    assert call("status", tmp_path) == (
        0,
        f"Nothing: there is no deepspeed in {tmp_path}. `tiered-zero deepspeed-alias install` adds it.\n",
    )
    for _ in range(2):  # again: it is written anew
        assert call("install", tmp_path)[0] == 0
        assert call("status", tmp_path) == (0, f"The alias: deepspeed {VERSION} in {tmp_path}.\n")
    code = """
import deepspeed, importlib.metadata, importlib.util, sys
assert importlib.util.find_spec("deepspeed") and importlib.metadata.version("deepspeed") == deepspeed.__version__
files = importlib.metadata.files("deepspeed")
assert all(file.size in (None, file.locate().stat().st_size) for file in files)
import deepspeed.utils.logging
from deepspeed.ops.adam import DeepSpeedCPUAdam
from tiered_zero.deepspeed import checkpointing
assert deepspeed.checkpointing is sys.modules["deepspeed.checkpointing"] is checkpointing, "one copy of its settings"
assert not [name for name in sys.modules if name.startswith("deepspeed.") and "tiered_zero." + name not in sys.modules]
try:
    from deepspeed.moe.layer import MoE
except ImportError as error:
    print(type(error).__name__)
"""
    assert run(code, tmp_path) == "MissingModuleError"
    command = [tmp_path / "bin" / "deepspeed", "--help"]
    assert "--num_gpus" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (own := tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    assert call("uninstall", tmp_path)[0] == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bin", "deepspeed", "other.py", own.name]
    assert call("uninstall", tmp_path)[0] == 1


def test_an_alias_of_another_version(tmp_path: Path) -> None:
    """It is named, replaced and removed, also without RECORD; no path of RECORD outside of the alias is touched."""
    assert call("install", tmp_path)[0] == 0
    old, new = (tmp_path / f"deepspeed-{version}.dist-info" for version in ("0.18.0+tiered.zero", VERSION))

    def make_old() -> None:
        new.rename(old)
        text = (old / "METADATA").read_text()
        (old / "METADATA").write_text(text.replace(VERSION, "0.18.0+tiered.zero"))

    make_old()
    assert call("status", tmp_path) == (0, f"The alias: deepspeed 0.18.0+tiered.zero in {tmp_path}.\n")
    assert call("install", tmp_path)[0] == 0
    assert new.is_dir() and not old.exists()
    make_old()
    (tmp_path / "other.py").touch()
    (old / "RECORD").write_text("other.py,,\n")
    assert call("uninstall", tmp_path)[0] == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bin", "other.py"]
    assert call("install", tmp_path)[0] == 0
    (new / "RECORD").unlink()
    assert call("uninstall", tmp_path)[0] == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bin", "other.py"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "deepspeed").write_text("#!/bin/sh\n")
    status, said = call("install", tmp_path)
    assert status == 1 and "expected no " in said and "--target DIR" in said
    assert (tmp_path / "bin" / "deepspeed").read_text() == "#!/bin/sh\n" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "bin" / "deepspeed").unlink()
    (tmp_path / "bin").rmdir()
    (tmp_path / "bin").touch()  # a file: no directory can be made
    status, said = call("install", tmp_path)
    assert status == 1 and "File exists" in said and "--target DIR" in said
    assert call("uninstall", tmp_path)[0] == 0 and [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_never_found_without_it() -> None:
    assert run("import importlib.util, tiered_zero; print(importlib.util.find_spec('deepspeed'))", Path()) == "None"


@pytest.mark.parametrize("kind", ["distribution", "folder"])
def test_the_real_one_stays_alone(kind: str, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    if kind == "distribution":
        info = tmp_path / "deepspeed-0.19.6.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.6\n")
    before = sorted(tmp_path.rglob("*"))
    status, said = call("install", tmp_path)
    assert status == 1 and "expected no DeepSpeed; found " in said and "pip uninstall deepspeed" in said
    assert call("status", tmp_path)[1].startswith("The real one: ")
    assert call("uninstall", tmp_path)[0] == 1
    assert sorted(tmp_path.rglob("*")) == before
