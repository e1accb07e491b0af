"""The first ring names files that exist, and a plain `pytest` collects it and nothing else."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests import conftest
from tests.support.rings import FIRST, TESTS, choose_ring, mark_full


def test_every_file_of_the_first_ring_exists() -> None:
    assert [path for path in FIRST if not path.exists()] == []


@pytest.mark.parametrize("source", ["TESTPATHS", "ARGS"])
def test_what_is_collected(source: str, pytestconfig: pytest.Config) -> None:
    """By the process that starts the workers, with the markers of pyproject.toml."""
    options: list[str] = pytestconfig.getini("addopts")
    given = SimpleNamespace(
        option=SimpleNamespace(markexpr=options[options.index("-m") + 1]),
        args_source=pytest.Config.ArgsSource[source],
        args=["tests/layout/test_units.py"],
        getoption=lambda name, default=None: {"numprocesses": 4, "collectonly": False}[name],
    )
    conftest.pytest_configure(cast(pytest.Config, given))
    is_first = source == "TESTPATHS"
    assert given.args == (list(map(str, FIRST)) if is_first else ["tests/layout/test_units.py"])
    assert ("not full and " in given.option.markexpr) == is_first
    for name in ("gpu", "cuda_wheel", "thorough", "clients"):
        assert f"not {name}" in given.option.markexpr


def test_full_collects_no_file_of_the_first_ring() -> None:
    given = SimpleNamespace(option=SimpleNamespace(markexpr="full"), args_source=pytest.Config.ArgsSource.TESTPATHS)
    given.args = ["tests"]
    choose_ring(cast(pytest.Config, given))
    first = {str(file) for path in FIRST for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    assert set(given.args) == set(map(str, TESTS.rglob("test_*.py"))) - first and first


@pytest.mark.parametrize(
    ("path", "marker", "is_full"),
    [(FIRST[0], "", False), (TESTS / "layout/test_units.py", "", True), (TESTS / "layout/test_units.py", "gpu", False)],
)
def test_what_full_selects(path: Path, marker: str, is_full: bool) -> None:
    marked: list[str] = []
    item = SimpleNamespace(path=path, get_closest_marker=lambda name: name == marker, add_marker=marked.append)
    mark_full(cast(pytest.Item, item))
    assert marked == ["full"] * is_full
