"""A placement that is chosen gives the bits of plain PyTorch, and leaves its config."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.support.models import ParityGPT, batch
from tests.support.trainers import Plain, assert_same_bits, follow, train
from tiered_zero.native.update import available_cpus
from tiered_zero.plan.machine import Disk, Machine, default_path


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT()


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 5 == 1)


@pytest.mark.parametrize(
    ("limits", "tiers"),
    [
        ({"host_memory_limit": "600KiB"}, {"device", "host", "nvme"}),
        ({"host_memory_limit": "560KiB", "device_memory_limit": "180KiB"}, {"device", "host", "nvme"}),
        ({"host_memory_limit": "1GiB"}, {"device"}),
    ],
)
def test_four_steps_give_the_bits_of_plain_torch(
    limits: dict[str, Any], tiers: set[str], swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    disk = Disk(path=str(tmp_path), read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    speeds = {"flops_per_s": {"fp32": 1e11}, "copy_bytes_per_s": 1e10, "update_bytes_per_s": 1e10}
    Machine(name=platform.node(), num_cores=available_cpus(), disks=(disk,), **speeds).save(default_path())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"offload_optimizer": {"nvme_path": str(swap_path)}, "sub_group_size": 2048},
        "tiered_zero": {"device": "cpu", "placement": "auto", "unit_size_cap": 20_000, "sequence_length": 16, **limits},
    }
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    assert {row.tier for row in engine.plan.rows if row.kind in ("param", "state")} == tiers
    chosen = json.loads((swap_path / "placement.json").read_text())
    assert chosen["zero_optimization"]["offload_optimizer"]["device"] == ("nvme" if "nvme" in tiers else "none")
    found = follow(lambda own: train(own, data, 4, 3), engine)
    plain = Plain(build(), lambda own: torch.optim.AdamW(own.parameters(), lr=3e-3), 3, 0.5)
    assert_same_bits(follow(lambda own: train(own, data, 4, 3), plain), found)
