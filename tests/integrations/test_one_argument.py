"""The Trainer of Transformers with one more argument, which puts the optimizer's state on a tier: plain Trainer's
bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import one_argument
from tests.integrations.one_argument import ALL, train
from tests.ranks.torchrun import run
from tests.support.trainers import Record, assert_same_bits

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

COURSES: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 0.0},
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"max_grad_norm": 0.5},
    "with a cosine schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    "with all of it": ALL,
}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("is_adapted", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("course", COURSES)
def test_it_trains_and_resumes_as_plain_trainer(
    course: str, is_adapted: bool, device: str, swap_path: Path, tmp_path: Path
) -> None:
    expected = train(None, swap_path, tmp_path / "plain", is_adapted=is_adapted, **COURSES[course])
    found = train(device, swap_path, tmp_path / "own", is_adapted=is_adapted, **COURSES[course])
    assert_same_bits(expected, found)
    assert not list(swap_path.iterdir())


@pytest.mark.parametrize("kind", ["full", "LoRA"])
def test_two_ranks_train_as_plain_trainer(kind: str, swap_path: Path, tmp_path: Path) -> None:
    """Trainer wraps the model in DistributedDataParallel; each rank keeps the whole state in files of its own."""
    records: list[list[dict[str, Any]]] = []
    for device in ("plain", "nvme"):
        folder = tmp_path / device
        folder.mkdir()
        run([one_argument.__file__, device, kind, str(swap_path), str(folder)], folder)
        records.append([torch.load(folder / f"rank{rank}.pt") for rank in range(2)])
    for expected, found in zip(*records, strict=True):
        assert_same_bits(Record(**expected), Record(**found))
    assert not list(swap_path.iterdir())
