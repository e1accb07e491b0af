"""The model that these tests train, and one step's counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tiered_zero
from tests.fake_cuda.child import FakeCuda
from tests.support.configs import zero_section

ROWS = 4


class Tower(nn.Module):
    """Layers of one size, each of which is a unit. `width`: of its input; a bias would be another parameter."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def build(
    tower: nn.Module, placement: str, swap_path: str, *, clipping: float = 1.0, zero: Any = None, **runtime: Any
) -> tiered_zero.Engine:
    """An engine on the fake device. `placement`: parameters/state, each none, cpu or nvme."""
    param, state = placement.split("/")
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero_section(param, state, Path(swap_path), **(zero or {})),
        "tiered_zero": {"device": "cuda", **runtime},
    }
    return tiered_zero.initialize(model=tower, config=config)[0]


def step(engine: tiered_zero.Engine, width: int) -> None:
    """Train one step, on a batch that comes from the host."""
    engine.backward(engine(torch.ones(ROWS, width).to(engine.device)))
    engine.step()


def counted_step(device: FakeCuda, engine: tiered_zero.Engine, width: int) -> dict[str, int]:
    """Return what one step adds to the device's counts, after what ran before it and until its own updates end."""
    engine.synchronize() if hasattr(engine, "synchronize") else torch.cuda.synchronize()
    before = device.counts()
    step(engine, width)
    after = device.counts()
    return {name: after[name] - before[name] for name in before}
