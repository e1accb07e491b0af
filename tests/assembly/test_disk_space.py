"""Ranks whose swap files fit on a disk one by one, and not together."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch import nn

import tiered_zero
from tests.ranks.pool import RankPool
from tests.support.file_systems import mounted
from tiered_zero.errors import TieredZeroError

WIDTH = 1600
"""Of a layer whose masters and moments take 29.3 MiB: more than half of a disk of 48 MiB."""


def start(swap_path: str, stage: int) -> tuple[str, str]:
    """Start a run whose state rests on NVMe, as much on each rank at every stage. Return the error."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": swap_path}},
        "tiered_zero": {"device": "cpu", "host_memory_limit": "2GiB", "comm_timeout_s": 60},
    }
    num_layers = int(os.environ["WORLD_SIZE"]) if stage else 1
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    try:
        tiered_zero.initialize(model=model, config=config)[0].close()
    except TieredZeroError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("stage", [0, 1])
def test_every_rank_ends_if_one_finds_no_space(ranks: RankPool, swap_path: Path, stage: int, kind: str) -> None:
    with mounted(kind, swap_path) as disk:
        assert ranks.run(start, 1, str(disk), stage) == [("", "")]
        found = ranks.run(start, 2, str(disk), stage)
        assert list(disk.iterdir()) == []
    full = [text for name, text in found if name == "StoreError"]
    assert full, "on a disk that finds at once that it is full, both raise StoreError"
    for text in full:
        assert re.search(rf"The swap file {disk}/.*/data\.bin needs 29\.3 MiB .* free there \(ENOSPC", text)
        assert "All ranks of a host need space at the same time" in text
    for name, text in found:
        assert name == "StoreError" or (name == "RankError" and re.match("Rank [01] ", text))
