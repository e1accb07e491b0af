"""The model that these tests train, and the engine that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.support.configs import config_of, zero_section
from tiered_zero.sizes import align_up

ROWS = 4
PLACEMENTS = ("none/none", "none/cpu", "none/nvme", "cpu/cpu", "cpu/nvme", "nvme/nvme")
"""Parameters/optimizer, as `offload_*.device` names them; none is the device."""

WINDOW = 3
"""Units on the device at the same time, where parameters are paged."""


class Tower(nn.Module):
    """Layers of one size, each of which is a unit of two parameters. `recompute`: each is in a reentrant checkpoint."""

    def __init__(self, num_layers: int, width: int, recompute: bool = False) -> None:
        super().__init__()
        self.width, self.recompute = width, recompute
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x.requires_grad_(), use_reentrant=True) if self.recompute else layer(x)
        return x.float().square().mean()

    @property
    def unit_numel(self) -> int:
        """Elements of a layer's unit, in whole pages: weight and bias."""
        return align_up(self.width * (self.width + 1), 1024)


def build(tower: Tower, placement: str, swap_path: str, clipping: float = 1.0) -> tiered_zero.Engine:
    """Build an engine on the fake device, with `WINDOW` units there where parameters are paged."""
    param, state = placement.split("/")
    zero = zero_section(
        param,
        state,
        Path(swap_path),
        stage3_max_live_parameters=WINDOW * tower.unit_numel,
        stage3_prefetch_bucket_size=tower.unit_numel,
    )
    config = config_of(
        zero,
        train_micro_batch_size_per_gpu=ROWS,
        gradient_clipping=clipping,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        tiered_zero={"device": "cuda"},
    )
    return tiered_zero.initialize(model=tower, config=config)[0]


def batch(engine: tiered_zero.Engine, rows: int = ROWS) -> Tensor:
    """Return a batch that has come from the host."""
    return torch.ones(rows, engine.module.width).to(engine.device)


def step(engine: tiered_zero.Engine, rows: int = ROWS) -> None:
    engine.backward(engine(batch(engine, rows)))
    engine.step()


def weights(engine: tiered_zero.Engine) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in engine.module.state_dict().items()}


def is_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
