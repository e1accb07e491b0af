"""Where an accelerator computes, two cores are left to the thread that launches and to the lanes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.support.trainers import adamw, tiered
from tiered_zero.native import update
from tiered_zero.optim import OffloadedOptimizer


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters())


def start(where: str, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None, swap_path: Path) -> None:
    model = nn.Linear(4, 4)
    if make_optimizer is None:
        OffloadedOptimizer(model.to(where).parameters(), torch.optim.AdamW, {"device": "cpu"}).close()
    else:
        tiered(model, swap_path, ("cpu", "cpu"), make_optimizer, runtime={"device": where}).close()


@on_device
def test_the_kernel_leaves_two_cores(device: LaggingDevice, swap_path: Path) -> None:
    """The kernel of the update, of norms and sums where the rule is torch's, and of an optimizer without an engine."""
    patch, opened = pytest.MonkeyPatch(), []
    patch.setattr(update, "available_cpus", lambda: 16)
    build = update.UpdateKernel.__init__

    def build_counted(self: update.UpdateKernel, *args: Any, **more: Any) -> None:
        build(self, *args, **more)
        opened.append(self.num_threads)

    patch.setattr(update.UpdateKernel, "__init__", build_counted)
    try:
        for make_optimizer in (adamw, rmsprop, None):
            for where, num_threads in (("cuda", 14), ("cpu", 16)):
                opened.clear()
                start(where, make_optimizer, swap_path)
                assert set(opened) == {num_threads}, (make_optimizer, where)
    finally:
        patch.undo()
