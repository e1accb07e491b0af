"""tools/swap_capacity.py gives the package's answer, from the checkout and as one file, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.swap_configs import configs, shapes
from tiered_zero.cli.main import main
from tiered_zero.plan.gpt_shape import GPTConfig

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "swap_capacity.py"
OTHERS = ("torch", "numpy", "click", "rich", "psutil", "safetensors", "aiofiles")
"""What the package depends on besides pydantic."""

RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({OTHERS}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def isolated(tool: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it without PYTHONPATH, in a process that cannot import torch."""
    command = [sys.executable, "-I", "-c", RUN, str(tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def ours(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["swap", "capacity", *map(str, arguments)])


def without_free_space(text: str) -> Any:
    """Free space moves while the tests of others run."""
    report = json.loads(text)
    for drive in report["drives"]:
        del drive["free_nbytes"]
    return report


@settings(max_examples=10)
@given(
    shape=shapes(),
    config=configs(),
    wear=st.sampled_from([(), ("--tbw", 0.6), ("--tbw", 600, "--step-seconds", 1.5), ("--step-seconds", 3)]),
    optimizer=st.booleans(),
)
def test_the_package_and_the_tool_give_one_answer(
    tmp_path_factory: pytest.TempPathFactory,
    shape: GPTConfig,
    config: dict[str, Any],
    wear: tuple[object, ...],
    optimizer: bool,
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if optimizer or key != "optimizer"}))
    alone, package = (
        answer(path, "--model", shape, *wear, "--json") for answer in (lambda *a: isolated(TOOL, *a), ours)
    )
    assert (alone.returncode, alone.stderr) == (package.exit_code, "") == (0, "")
    assert without_free_space(alone.stdout) == without_free_space(package.stdout)


def test_the_words_are_the_same_too() -> None:
    arguments = (ROOT / "configs" / "gpt_nvme.json", "--params", "7e6", "--tbw", 600, "--step-seconds", 1)
    alone, package = isolated(TOOL, *arguments), ours(*arguments)
    free = "free there"
    lines = [line for line in alone.stdout.splitlines() if free not in line]
    assert lines == [line for line in package.stdout.splitlines() if free not in line]
    assert len(lines) == len(alone.stdout.splitlines()) - 1 and any("TB per day" in line for line in lines)


def test_one_file_is_enough(tmp_path: Path) -> None:
    one = tmp_path / "swap_capacity.pyz"
    assert isolated(TOOL, "--build-zipapp", one).returncode == 0
    arguments = (ROOT / "configs" / "gpt_nvme.json", "--params", "1e7", "--json")
    carried, here = isolated(one, *arguments), isolated(TOOL, *arguments)
    assert (carried.returncode, carried.stderr) == (0, "")
    assert without_free_space(carried.stdout) == without_free_space(here.stdout)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"zero_optimization": {"stage": 4}},
            (),
            "zero_optimization.stage: expected 0, 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            (),
            "offload_optimizer.nvme_path: expected a directory",
        ),
        (
            {
                "optimizer": {"type": "Odd"},
                "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a"}},
            },
            (),
            "optimizer.type 'Odd' is not known here",
        ),
        ({"tiered_zero": {"state_format": "int4"}}, (), "tiered_zero.state_format: "),
        ({}, ("--tbw", "0"), "above zero"),
        ({}, ("--model", "gpt:layers=0"), "A GPT needs layers >= 1"),
        ({}, ("--params", "1e7"), "not allowed with"),
        ("{", (), "Expecting property name"),
    ],
)
def test_what_cannot_be_known_is_named(tmp_path: Path, config: Any, options: tuple[str, ...], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps({"train_batch_size": 1, **config}))
    model = () if "--model" in options else ("--model", "gpt:")
    shown = isolated(TOOL, path, *model, *options)
    assert shown.returncode == 2 and message in shown.stderr and "Traceback" not in shown.stderr


def test_what_does_not_fit_is_exit_code_1(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "gpt_nvme.json")
    for code in (isolated(TOOL, config, "--params", "1e13").returncode, ours(config, "--params", "1e13").exit_code):
        assert code == 1
