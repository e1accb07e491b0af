"""The first ring names files that exist, and a plain `pytest` collects it and nothing else."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.house import ROOT
from tests.support.rings import FIRST, TESTS, mark_full


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line.partition(":")[0] for line in found.splitlines() if line.startswith("tests/")}


def test_every_file_of_the_first_ring_exists() -> None:
    assert [path for path in FIRST if not path.exists()] == []


@pytest.mark.parametrize("arguments", [(), ("tests/layout/test_units.py",)])
def test_what_is_collected(arguments: tuple[str, ...]) -> None:
    files = collected(*arguments)
    is_first = {any((ROOT / file).is_relative_to(path) for path in FIRST) for file in files}
    assert is_first == {not arguments}
    assert not arguments or files == set(arguments)


@pytest.mark.parametrize(
    ("path", "marker", "is_full"),
    [(FIRST[0], "", False), (TESTS / "layout/test_units.py", "", True), (TESTS / "layout/test_units.py", "gpu", False)],
)
def test_what_full_selects(path: Path, marker: str, is_full: bool) -> None:
    marked: list[str] = []
    item = SimpleNamespace(path=path, get_closest_marker=lambda name: name == marker, add_marker=marked.append)
    mark_full(cast(pytest.Item, item))
    assert marked == ["full"] * is_full
