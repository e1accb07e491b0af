"""Tools that import `deepspeed` and find the alias: Trainer with a DeepSpeed JSON, and `accelerate launch`, with
parameters on NVMe, have the bits of the same program without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.clients import alias_child
from tests.support.trainers import Record, assert_same_bits
from tiered_zero.cli.main import main

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

Run = Callable[..., list[Record]]


@pytest.fixture
def run(tmp_path: Path, swap_path: Path) -> Run:
    """(kind, name, launcher, num_ranks, config) -> what each rank has seen. A config: under the alias."""
    assert CliRunner().invoke(main, ["deepspeed-alias", "install", "--target", str(tmp_path / "alias")]).exit_code == 0

    def start(
        kind: str, name: str, launcher: list[str], num_ranks: int = 1, config: dict[str, Any] | None = None, **env: str
    ) -> list[Record]:
        (output := tmp_path / name).mkdir(exist_ok=True)
        path = os.environ["PYTHONPATH"]
        if config is not None:
            path = os.pathsep.join((str(tmp_path / "alias"), path))
            (output / "config.json").write_text(json.dumps(config))
        given = str(output / "config.json") if config is not None else ""
        command = [part.replace("CONFIG", given) for part in launcher]
        done = subprocess.run(
            [*command, alias_child.__file__, kind, given, str(output)],
            env={**os.environ, "PYTHONPATH": path, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        assert not list(swap_path.iterdir())
        return [Record(**torch.load(output / f"rank{rank}.pt")) for rank in range(num_ranks)]

    return start


def nvme(swap_path: Path, **more: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(swap_path)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero |= {"offload_param": {**place, "max_in_cpu": 0}, "offload_optimizer": place}
    return {"zero_optimization": zero, **more}


def test_trainer_with_a_deepspeed_json(run: Run, swap_path: Path) -> None:
    """Six steps, and the last three again from the checkpoint, in another process."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = nvme(swap_path, **dict.fromkeys(auto, "auto"))
    for kind in ("trainer", "resumed"):
        (expected,) = run(kind, "plain", [sys.executable])
        (found,) = run(kind, "json", [sys.executable], config=config)
        assert_same_bits(expected, found)


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_machines=1"]
ACCELERATE += ["--mixed_precision=no", "--deepspeed_config_file=CONFIG"]


def test_accelerate_launch_on_one_rank(run: Run, swap_path: Path) -> None:
    (expected,) = run("accelerate", "plain", [sys.executable], CLIPPING="0.5")
    config = nvme(swap_path, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, gradient_clipping=0.5)
    (found,) = run("accelerate", "json", [*ACCELERATE, "--num_processes=1"], config=config)
    assert_same_bits(expected, found)


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_accelerate_launch_on_two_ranks(clipping: float, run: Run, swap_path: Path) -> None:
    """The bits of DistributedDataParallel; with clipping the last digits of the norm are others (docs/ranks.md)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    expected = run("accelerate", "plain", torchrun, 2, CLIPPING=str(clipping))
    config = nvme(swap_path, train_micro_batch_size_per_gpu=2, gradient_clipping=clipping)
    launcher = [*ACCELERATE, "--num_processes=2"]
    found = run("accelerate", "json", launcher, 2, config)
    for theirs, ours in zip(expected, found, strict=True):
        if not clipping:
            assert_same_bits(theirs, ours)
        assert torch.allclose(torch.stack(theirs.seen), torch.stack(ours.seen), rtol=1e-6, atol=0)
    if not clipping:
        with pytest.raises(AssertionError, match="split the data over 2 ranks; it knows of 1"):
            run("accelerate", "unnamed", launcher, 2, config, UNNAMED="1")
