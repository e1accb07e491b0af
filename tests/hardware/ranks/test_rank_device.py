"""Before the device of a rank is chosen, what NCCL and CUDA read as they start is set."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiered_zero.hardware.ranks import rank_device
from tiered_zero.hardware.ranks.rank_device import choose_device


@pytest.mark.parametrize(("world_size", "name", "is_set"), [(2, "auto", True), (2, "cpu", False), (1, "auto", False)])
def test_launches_of_two_groups_are_ordered_where_ranks_may_have_gpus(
    world_size: int, name: str, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    expected = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"} if is_set else {})}

    def find(name: str) -> torch.device:
        assert os.environ == expected, "set before CUDA may start"
        return torch.device("cpu")

    monkeypatch.setattr(rank_device, "find_device", find)
    ranks: Any = SimpleNamespace(world_size=world_size)
    choose_device(ranks, name)
    assert os.environ == expected
