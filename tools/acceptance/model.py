"""The models that the acceptance trains, and their configs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Size:
    """`tokens`: of a sequence."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    tokens: int


SIZES = {
    "tiny": Size(layers=3, hidden=32, heads=2, vocab=64, tokens=16),
    "small": Size(layers=12, hidden=256, heads=4, vocab=1024, tokens=128),
    "1.3b": Size(layers=24, hidden=2048, heads=16, vocab=50304, tokens=2048),
    "3b": Size(layers=32, hidden=2560, heads=32, vocab=32000, tokens=2048),
    "7b": Size(layers=32, hidden=4096, heads=32, vocab=32000, tokens=2048),
}


class Linear(nn.Linear):
    """With a cheap initialization: billions of values are drawn before the first step."""

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -0.02, 0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.hidden) for _ in range(2))
        self.attention = Linear(size.hidden, 3 * size.hidden)
        self.out = Linear(size.hidden, size.hidden)
        self.up, self.down = Linear(size.hidden, 4 * size.hidden), Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Transformer(nn.Module):
    """Returns the loss of predicting each token from those before it. `recompute`: blocks are checkpointed."""

    def __init__(self, size: Size, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = Linear(size.hidden, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch(size: Size, number: int, device: torch.device | str, rows: int = 2) -> Tensor:
    """Batch `number` of a run: [rows, tokens]. Low tokens are frequent, which a model learns in a few steps."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.rand(rows, size.tokens, generator=generator, dtype=torch.float64).pow(4).mul(size.vocab)
    return tokens.long().to(device)


def meta_model(size: Size) -> Transformer:
    """With recomputation, and without values: they come unit by unit."""
    with torch.device("meta"):
        return Transformer(size, recompute=True)


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a run trains. `placement`: parameters/state, each none, cpu or nvme. `clip`: 0 does not clip."""

    placement: str = "cpu/cpu"
    update: str = "auto"
    clip: float = 0.0
    accumulation: int = 1
    bf16: bool = False
    lr: float = 1e-3

    @property
    def name(self) -> str:
        """In one line, as "cpu/nvme overlapped bf16 clip 1.0 x2"."""
        return f"{self.placement} {self.update} {'bf16' if self.bf16 else 'fp32'} clip {self.clip} x{self.accumulation}"


def make_config(course: Course, directory: Path, runtime: dict[str, Any], rows: int = 2) -> dict[str, Any]:
    params, state = course.placement.split("/")
    path = {"nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": course.accumulation,
        "gradient_clipping": course.clip,
        "bf16": {"enabled": course.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": course.lr, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": params, "max_in_cpu": 0, **path},
            "offload_optimizer": {"device": state, **path},
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"update": course.update, **runtime},
    }
