"""The first ring names files that exist, and a plain `pytest` collects it and nothing else."""

import subprocess
import sys

import pytest

from tests.house import ROOT
from tests.support.rings import FIRST


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line.partition(":")[0] for line in found.splitlines() if line.startswith("tests/")}


def test_every_file_of_the_first_ring_exists() -> None:
    assert [path for path in FIRST if not path.exists()] == []


@pytest.mark.parametrize("arguments", [(), ("-m", "full"), ("tests/layout/test_units.py",)])
def test_what_is_collected(arguments: tuple[str, ...]) -> None:
    files = collected(*arguments)
    is_first = {any((ROOT / file).is_relative_to(path) for path in FIRST) for file in files}
    assert is_first == {not arguments}
    assert len(arguments) != 1 or files == set(arguments)
