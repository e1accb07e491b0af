"""Where updates begin in backward: one that breaks off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.support.configs import SMALL_DEVICE


class _Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if _Breaks.armed:
            raise ValueError("backward breaks")
        return grad


class _Breakable(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](_Breaks.apply(self[1](self[0](x)))).pow(2).mean()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_backward_that_breaks_off_before_any_update_is_a_step_left_out(tier: str, swap_path: Path) -> None:
    """The last module's gradients are complete by then, but its sub-group waits for others: nothing is updated."""
    offload = {"device": tier, "nvme_path": str(swap_path)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": offload, "offload_optimizer": offload}
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "tiered_zero": {**SMALL_DEVICE, "device": "cpu", "unit_size_cap": 1},
    }
    x, found = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), []
    for breaks in (True, False):
        torch.manual_seed(0)
        model = _Breakable(*(nn.Linear(64, 64) for _ in range(3)))
        losses = []
        with tiered_zero.initialize(model=model, config=config)[0] as engine:
            for index in range(4 if breaks else 3):
                _Breaks.armed = breaks and index == 1
                try:
                    loss = engine(x)
                    engine.backward(loss)
                except ValueError:
                    engine.abort_step()
                else:
                    engine.step()
                    losses.append(loss.item())
        found.append(losses)
    assert len(found[0]) == 3 and found[0] == found[1]
