"""Trainer, Accelerate and TRL with a DeepSpeed config as their one further line, over the `deepspeed` distribution of
tiered_zero, at stages 0 to 3 with everything on the device, on cpu or on nvme: the bits of the plain script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.clients import deepspeed_child
from tests.integrations.conftest import gpt2
from tests.ranks.torchrun import run
from tests.support.trainers import Record, assert_same_bits
from tiered_zero.cli.main import main

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

ALL = tuple(f"{stage}-{device}" for stage in range(4) for device in ("none", "cpu", "nvme"))
STAGE_3 = ("3-none", "3-cpu", "3-nvme")
FEW = ("0-none", "1-nvme", "2-cpu", "3-cpu", "3-nvme")
KINDS: dict[str, tuple[str, ...]] = {
    "clipped": ALL,
    "unclipped": FEW,
    "checkpointed": FEW,
    "LoRA": FEW,
    "resume": FEW,
    "best": FEW,
    "pretrained": FEW,
    "untrained": STAGE_3,
    "plugin": FEW,
    "SFT": ("2-cpu", *STAGE_3),
    "DPO": ("2-cpu", *STAGE_3),
    "GRPO": ("2-cpu", *STAGE_3),
}


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a child finds a model; and the alias, for children only."""
    assert CliRunner().invoke(main, ["deepspeed-alias", "install", "--target", str(tmp_path / "alias")]).exit_code == 0
    gpt2().save_pretrained(tmp_path / "pretrained")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "alias"), os.environ["PYTHONPATH"])))
    return tmp_path


def record_of(output: Path, kind: str, rank: int = 0) -> Record:
    return Record(**torch.load(output / f"{kind}-rank{rank}.pt"))


@pytest.mark.parametrize("course", KINDS)
def test_one_rank_has_the_bits_of_the_plain_script(course: str, swap_path: Path, output: Path) -> None:
    command = [sys.executable, deepspeed_child.__file__, course, str(swap_path), str(output), "plain", *KINDS[course]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    expected = record_of(output, "plain")
    assert expected.weights and any(isinstance(value, torch.Tensor) for value in expected.seen)
    for kind in KINDS[course]:
        assert_same_bits(expected, record_of(output, kind))
    assert not list(swap_path.iterdir())


def without_norms(record: Record) -> Record:
    """Tensors, and the losses: DistributedDataParallel's program adds the norm up in fp32."""
    seen: list[Any] = [value for value in record.seen if isinstance(value, torch.Tensor)]
    return Record(seen, record.weights)


@pytest.mark.parametrize("course", ["unclipped", "one micro-batch", "best", "pretrained"])
def test_two_ranks_are_equal_over_stages_and_tiers(course: str, swap_path: Path, output: Path) -> None:
    """And without clipping equal to DistributedDataParallel, but for the last bits of the norm."""
    plain = ["plain"] if course == "unclipped" else []
    run([deepspeed_child.__file__, course, str(swap_path), str(output), *plain, *FEW], output)
    for rank in range(2):
        first, *others = (record_of(output, kind, rank) for kind in FEW)
        for found in others:
            assert_same_bits(first, found)
        if plain:
            assert_same_bits(without_norms(record_of(output, "plain", rank)), without_norms(first))
    assert not list(swap_path.iterdir())
