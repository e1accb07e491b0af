"""The notebook's two training scripts, over each of its configurations as it stands there."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The scripts' loader forks its workers while the engine's threads live: they only index a list of texts.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

CONFIGS = sorted((ROOT / "configs").glob("notebook_*.json"))


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[Any]:
    """(script, arguments) -> the names that it defines. Its engine, which it leaves open, is closed after the test."""
    engines = []

    def run(name: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(str(HERE))
        names = runpy.run_path(str(HERE / name), run_name="__main__")
        engines.append(names["engine"])
        return names

    yield run
    for engine in engines:
        engine.close()


def check_training(names: dict[str, Any], output: str) -> None:
    """The loss scale came down from 2^32, all steps since were made, and every weight has moved."""
    engine, scheduler, num_steps = names["engine"], names["scheduler"], names["i"] + 1
    assert num_steps == engine.global_steps == 26
    assert re.findall(r"step:(\d+), loss:[3-7]\.\d", output) == ["0", "10", "20"]
    assert engine.loss_scale == 2.0**32 / 2.0 ** (engine.skipped_steps - 1)  # the first overflow is on credit
    assert 14 <= engine.skipped_steps <= 20
    num_updates = num_steps - engine.skipped_steps
    assert scheduler.last_batch_iteration == num_updates - 1
    assert engine.get_lr() == scheduler.get_last_lr() == [names["optimizer"].param_groups[0]["lr"]]
    before, after = names["build_model"]().state_dict(), engine.module.state_dict()
    assert before.keys() == after.keys()
    furthest = {}
    for name, weight in after.items():
        assert weight.dtype == torch.float16
        assert weight.isfinite().all()
        furthest[name] = (weight.float() - before[name]).abs().max().item()
    still = [name for name, distance in furthest.items() if distance == 0.0]
    assert all(name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) for name in still), still
    assert max(furthest.values()) <= num_updates * 3e-5 + 2**-11  # Adam moves by the rate a step; ones round to 2^-11
    assert names["loss"].dtype == torch.float32


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_cell_38_with_each_configuration(config: Path, run_script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_script("zero_dp_args.py", f"--deepspeed_config={config}", "--local_rank=0")
    check_training(names, capsys.readouterr().out)


def test_cell_41(run_script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    check_training(run_script("zero_config.py"), capsys.readouterr().out)


def test_all_placements_of_the_notebook_give_the_same_weights(run_script: Any) -> None:
    """fp16 bits do not depend on where things rest."""
    device, host = (
        run_script("zero_dp_args.py", f"--deepspeed_config={ROOT}/configs/notebook_{name}.json")["engine"]
        for name in ("zero1", "offload")
    )
    theirs = host.module.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in device.module.state_dict().items())


@pytest.mark.slow
def test_the_script_as_a_program_ends_by_itself() -> None:
    """It never closes its engine: the interpreter's end does, without a word and without a failure."""
    config = ROOT / "configs" / "notebook_offload.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "zero_dp_args.py"), "--deepspeed_config", str(config)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONSAFEPATH": ""},  # the script imports a module beside it
    )
    assert done.returncode == 0, done.stderr
    assert "step:20, loss:" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_configurations_and_the_dict_of_cell_41_agree() -> None:
    """The inline dict is one of the files; the files are valid JSON of what the notebook says."""
    tree = ast.parse((HERE / "zero_config.py").read_text())
    (inline,) = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "config"]
    assert len(CONFIGS) == 4
    assert ast.literal_eval(inline.value) == json.loads((ROOT / "configs" / "notebook_zero1_inline.json").read_text())
