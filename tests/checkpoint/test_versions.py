"""Files of versions that were never published are refused in one line, which names their version and the expected one.

`version_2/` is what commit 1f7e0f9 wrote, without data files: a full save, an in-place commit, and its swap directory.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn

import tiered_zero
from tests.support.walks import host_config
from tiered_zero.cli.main import main
from tiered_zero.errors import StoreError

OLD_TAG = "expected tiered_zero.checkpoint version 5, found tiered_zero.checkpoint version 2"
OLD_OWNER = "expected tiered_zero.owner version 5, found no header: it is damaged, or of an older version"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(__file__).parent / "version_2", tmp_path / "old"))


def start(resume: Path | None = None) -> tiered_zero.Engine:
    settings = host_config()
    settings["tiered_zero"]["checkpoint"] = {"resume": resume and str(resume)}
    return tiered_zero.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=settings)[0]


@pytest.mark.parametrize("place", ["tags", "tags/full", "tags/in_place"])
def test_tags_of_version_2_are_refused(old: Path, place: str) -> None:
    with start() as engine, pytest.raises(StoreError, match=OLD_TAG) as loaded:
        engine.load_checkpoint(old / place)
    with pytest.raises(StoreError, match=OLD_TAG) as resumed:
        start(resume=old / place)
    assert "\n" not in f"{loaded.value}{resumed.value}" and str(old) in str(resumed.value)


def test_swap_directories_of_version_1_are_refused(old: Path) -> None:
    (run,) = (old / "nvme").iterdir()
    with start() as engine, pytest.raises(StoreError, match=OLD_OWNER) as loaded:
        engine.load_checkpoint(run)
    with pytest.raises(StoreError, match=OLD_OWNER) as resumed:
        start(resume=run)
    assert "\n" not in f"{loaded.value}{resumed.value}"


@pytest.mark.parametrize(
    ("command", "place", "message", "code"),
    [
        ("checkpoint ls", "tags", OLD_TAG, 0),
        ("checkpoint verify", "tags", OLD_TAG, 1),
        ("swap ls", "nvme", OLD_OWNER, 0),
    ],
)
def test_they_are_listed_with_their_version(old: Path, command: str, place: str, message: str, code: int) -> None:
    result = CliRunner().invoke(main, [*command.split(), str(old / place)])
    (line,) = (line for line in result.stdout.splitlines() if "version" in line)
    assert result.exit_code == code and message in line
