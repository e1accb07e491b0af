"""Every program in docs/examples runs as a user would run it, without a warning, and learns."""

import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def _in_scratch(swap_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.chdir(swap_path)


def main_of(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.parametrize("name", ["plain_loop", "lora", "own_data", "offloaded_state"])
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


@pytest.mark.parametrize("at", [1, 7, 15, 44])
def test_a_stopped_example_goes_on_with_the_same_losses(
    at: int, no_leaks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_of("resume")
    expected = main("undisturbed")
    assert len(expected) == 45 and expected[-1] < expected[0] / 2
    step = tiered_zero.Engine.step

    def stopping_step(engine: tiered_zero.Engine) -> None:
        step(engine)
        if engine.global_steps == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(tiered_zero.Engine, "step", stopping_step)
        main("stopped")
    assert stopped.value.code == 128 + signal.SIGTERM
    torch.rand(3)
    assert main("stopped") == expected
    assert f"stopped/global_step{at}\n" in capsys.readouterr().out
    assert not list(Path("swap").glob("*"))


def test_the_lines_of_the_page_on_optimizers_run(swap_path: Path) -> None:
    page = (EXAMPLES.parent / "optimizers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for block in blocks:
            names: dict[str, Any] = {"model": torch.nn.Linear(3, 2), "ddp_model": torch.nn.Linear(3, 2), "torch": torch}
            exec(block.replace("/path/on/nvme", str(swap_path)), names)
            names["optimizer"].step()
            names["optimizer"].close()
    finally:
        torch.distributed.destroy_process_group()


def test_the_program_of_the_guide_runs(swap_path: Path, no_leaks: None, capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLES.parent / "guide.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(program, {})
    assert "nvme: " in capsys.readouterr().out
    assert torch.load("weights.pt")["0.0.weight"].shape == (512, 512)


def test_every_example_has_a_test() -> None:
    here = {"plain_loop", "lora", "own_data", "offloaded_state", "hf_model", "resume"}
    elsewhere = {"qlora": "tests/clients", "full_finetune": "tests/tools/test_first_screen.py"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == here | elsewhere.keys()
