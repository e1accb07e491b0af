"""The run that moves from DeepSpeed: its model, batches and config, which programs on both sides import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NUM_RANKS = 2
STEPS_BEFORE, STEPS_AFTER = 6, 3
CASES = {"stage_2_fp16": (2, "fp16"), "stage_3_fp32": (3, "fp32")}
"""Name -> ZeRO stage and dtype."""


class Model(nn.Module):
    """A tied head, a frozen parameter, a buffer, and biases whose sizes do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 7)
        self.scale = nn.Parameter(torch.rand(7) + 0.5, requires_grad=False)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.head = nn.Linear(7, 16, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("offset", torch.rand(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale
        x = x + self.down(torch.relu(self.up(x + self.offset.to(x.dtype))))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    trained = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in trained if param.dim() > 1]
    others = [param for param in trained if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def config(stage: int, dtype: str) -> dict[str, Any]:
    """Both libraries take it."""
    chosen: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "sub_group_size": 120},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
    }
    if dtype == "fp16":
        chosen["fp16"] = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 6, "hysteresis": 1}
    return chosen
