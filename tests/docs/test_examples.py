"""Every program in docs/examples runs as a user would run it, without a warning, and learns."""

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def _in_scratch(swap_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.chdir(swap_path)


def main_of(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize("name", ["plain_loop", "lora", "own_data"])
def test_the_example_learns(name: str, no_leaks: None, capsys: pytest.CaptureFixture[str]) -> None:
    losses = main_of(name)()
    assert losses[-1] < losses[0]
    assert f"{losses[-1]:.3f}" in capsys.readouterr().out
    assert not list(Path("swap").glob("*"))  # the run's own directory is removed


def test_the_hugging_face_example_learns(no_leaks: None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    losses = main_of("hf_model")("swap")
    assert sum(losses[-4:]) < sum(losses[:4]) - 2
    assert "update policy" in capsys.readouterr().out
    assert not list(Path("swap").glob("*"))


def test_every_example_has_a_test() -> None:
    tested = {"plain_loop", "lora", "own_data", "hf_model"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
