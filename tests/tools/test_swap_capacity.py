"""tools/swap_capacity.py gives the package's answer, and needs nothing but Python."""

from __future__ import annotations

import ast
import json
import shutil
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
from tiered_zero.config.json_file import parse_json
from tiered_zero.layout.swap_bytes import GPTShape

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "swap_capacity.py"
FORMULAS = ROOT / "tiered_zero" / "layout" / "swap_bytes.py"


def isolated(tool: Path, *arguments: object, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """-I -S: no site-packages, no PYTHONPATH, no folder of the script: the standard library alone."""
    command = [sys.executable, "-I", "-S", *python, str(tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def ours(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["swap", "capacity", *map(str, arguments)])


def without_free_space(text: str) -> Any:
    """Free space moves while the tests of others run."""
    report = json.loads(text)
    for drive in report["drives"]:
        del drive["free_nbytes"]
    return report


@settings(max_examples=40)
@given(
    shape=shapes(),
    config=configs(),
    wear=st.sampled_from([(), ("--tbw", 0.6), ("--tbw", 600, "--step-seconds", 1.5), ("--step-seconds", 3)]),
    optimizer=st.booleans(),
)
def test_the_package_and_the_tool_give_one_answer(
    tmp_path_factory: pytest.TempPathFactory,
    shape: GPTShape,
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


def test_two_files_are_enough(tmp_path: Path) -> None:
    for file in (TOOL, FORMULAS):
        shutil.copy(file, tmp_path)
    config = tmp_path / "config.json"
    shutil.copy(ROOT / "configs" / "gpt_nvme.json", config)
    shown = isolated(tmp_path / TOOL.name, config, "--params", "1e7", "--json", python=("-X", "importtime"))
    assert shown.returncode == 0 and json.loads(shown.stdout)["nbytes"] > 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in shown.stderr.splitlines()}
    assert (
        {"argparse", "json"} <= imported <= sys.stdlib_module_names | {"swap_bytes", "imported package", "org"}
    )  # the last: tried by copy.py
    (tmp_path / FORMULAS.name).unlink()
    alone = isolated(tmp_path / TOOL.name, config, "--params", "1e7")
    assert alone.returncode == 1 and "copy it there" in alone.stderr


@pytest.mark.parametrize("path", [TOOL, FORMULAS])
def test_old_pythons_can_read_it(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in ast.walk(tree))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, // one\n "b": "http://x", # two\n /* three\n */ "c": [1, 2,],}',
        '{"#": "// no comment", "\\"//": "/* */",}',
        '{"a": "x,}", "b": [",]",],}',
    ],
)
def test_comments_are_read_as_by_the_package(text: str) -> None:
    code = "import runpy, sys, json; tool = runpy.run_path(sys.argv[1]); "
    code += "print(json.dumps(tool['parse_json'](sys.argv[2])))"
    command = [sys.executable, "-I", "-S", "-c", code, str(TOOL), text]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert json.loads(shown) == parse_json(text, "text")


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "a"}}},
            (),
            "needs zero_optimization.stage 3",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            (),
            "offload_optimizer.nvme_path is missing",
        ),
        (
            {
                "optimizer": {"type": "Odd"},
                "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "a"}},
            },
            (),
            "optimizer.type 'Odd' is not known here",
        ),
        ({"tiered_zero": {"state_format": "int4"}}, (), "tiered_zero.state_format is one of fp32, bf16_remainder"),
        ({}, ("--tbw", "0"), "above zero"),
        ({}, ("--model", "gpt:layers=0"), "sizes of at least 1"),
        ({}, ("--params", "1e7"), "not allowed with"),
        ("{", (), "Expecting property name"),
    ],
)
def test_what_cannot_be_told_is_said(tmp_path: Path, config: Any, options: tuple[str, ...], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    model = () if "--model" in options else ("--model", "gpt:")
    shown = isolated(TOOL, path, *model, *options)
    assert shown.returncode == 2 and message in shown.stderr and "Traceback" not in shown.stderr


def test_what_does_not_fit_is_exit_code_1(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "gpt_nvme.json")
    for code in (isolated(TOOL, config, "--params", "1e13").returncode, ours(config, "--params", "1e13").exit_code):
        assert code == 1
