"""`tiered-zero launch`: torchrun with the words of DeepSpeed's launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tiered_zero.cli.deepspeed_commands import launch

SCRIPT = """
import os, sys
with open(os.environ["RANK"] + ".txt", "w") as file:
    print(*sys.argv[1:], os.environ["WORLD_SIZE"], file=file, end="")
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.mark.slow
def test_ranks_get_their_number_and_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tiered_zero", "launch", "--num_gpus=2", "script.py", "--x", "--help"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == [
        f"--local_rank={rank} --x --help 2" for rank in range(2)
    ]
    command[4:] = ["--num_gpus", "1", "--no_local_rank", "script.py", "fail"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1
    assert (tmp_path / "0.txt").read_text() == "fail 1"


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        (["--num_nodes", "2"], "start torchrun on each"),
        (["--hostfile=hosts"], "start torchrun on each"),
        (["--include", "localhost:0"], "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_torchrun_does_is_refused(option: list[str], remedy: str) -> None:
    refused = CliRunner().invoke(launch, [*option, "script.py"])
    assert refused.exit_code == 2 and remedy in refused.output
