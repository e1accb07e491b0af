"""Define a small GPT: pre-norm blocks, causal attention, GELU, learned positions, tied embedding and head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiered_zero.plan.gpt_shape import GPTConfig

INIT_STD = 0.02
"""The standard deviation of initial weights (GPT-2, section 2.3)."""


class Embedding(nn.Embedding):
    """`nn.Embedding` with GPT-2's initial values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Linear(nn.Linear):
    """`nn.Linear` with GPT-2's initial values: normal with `std`, bias zero."""

    def __init__(self, num_in: int, num_out: int, std: float = INIT_STD, bias: bool = True) -> None:
        self.std = std
        super().__init__(num_in, num_out, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)). Input and output are [B, T, hidden]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, residual_std = config.hidden, INIT_STD / math.sqrt(2 * config.layers)
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = Linear(hidden, 3 * hidden)
        self.attention_out = Linear(hidden, hidden, residual_std)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = Linear(hidden, 4 * hidden)
        self.mlp_out = Linear(4 * hidden, hidden, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        change: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return x + change

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class GPT(nn.Module):
    """A GPT. Each of its modules with parameters has `reset_parameters`, for models on the meta device."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab, config.hidden)
        self.positions = Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, vocab]; with `targets`, the mean loss in fp32. Both arguments: [B, T] int64, T <=
        context."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_gpt(config: GPTConfig, device: str = "meta") -> GPT:
    """Build the model. On `meta` it takes no memory; an engine then initializes the values unit by unit."""
    with torch.device(device):
        return GPT(config)
