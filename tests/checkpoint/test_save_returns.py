"""A save is complete, durable and listed when its call returns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import tiered_zero
from tests.support.inspection import differences, everything
from tests.support.models import ParityGPT, batch
from tests.support.tags import unfinished
from tests.support.trainers import tiered
from tiered_zero.checkpoint.tag import list_tags

pytestmark = pytest.mark.usefixtures("one_thread")


def make(swap_path: Path, placement: tuple[str, str], seed: int = 0, **runtime: object) -> tiered_zero.Engine:
    torch.manual_seed(seed)
    return tiered(ParityGPT(num_blocks=1), swap_path, placement, runtime=runtime)


def train(engine: tiered_zero.Engine, number: int) -> None:
    engine.backward(engine(*batch(number)))
    engine.step()


@pytest.mark.parametrize("update", ["barrier", "overlapped", "delayed"])
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_a_save_is_there_when_its_call_returns(
    placement: tuple[str, str], update: str, swap_path: Path, tmp_path: Path
) -> None:
    """Scripts that list, rotate and copy checkpoints right after the call find all of it, and nothing else."""
    saves, copied = tmp_path / "saves", tmp_path / "copied"
    with make(swap_path, placement, update=update) as engine:
        for step in range(3):
            train(engine, step)
            engine.save_checkpoint(saves)
            assert {f"global_step{step + 1}", "latest"} <= set(os.listdir(saves)) and unfinished(saves) == []
            assert all(info.complete for info in list_tags(saves))
            if step:
                shutil.rmtree(saves / f"global_step{step}")
        shutil.copytree(saves, copied)
        expected = everything(engine)
    with make(swap_path, placement, seed=1) as engine:
        engine.load_checkpoint(copied)
        assert engine.global_steps == 3
        if update != "delayed":  # which makes state of what has no gradient, too
            assert differences(expected, everything(engine)) == []


def test_a_commit_is_there_when_its_call_returns(swap_path: Path, tmp_path: Path) -> None:
    with make(swap_path, ("nvme", "nvme"), update="overlapped", checkpoint={"in_place": True}) as engine:
        train(engine, 0)
        engine.save_checkpoint(tmp_path)
        assert [(info.tag, info.complete) for info in list_tags(tmp_path)] == [("global_step1", True)]
