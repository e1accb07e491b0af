"""A small GPT: pre-norm blocks, causal attention, GELU, learned positions, one weight for embedding and head."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiered_zero.errors import ConfigError

INIT_STD = 0.02
"""Of every weight matrix; projections into the residual stream divide it by sqrt(2 * layers) (GPT-2, section 2.3)."""

HEAD_SIZE = 64
"""Where `heads` is not given, there is one per so many channels."""


@dataclass(frozen=True)
class GPTConfig:
    """Counts, not bytes. `heads` 0: one for each 64 channels. `tied`: the head's weight is the embedding's."""

    layers: int = 8
    hidden: int = 384
    heads: int = 0
    vocab: int = 256
    context: int = 256
    tied: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError for a shape that no GPT can have."""
        if not self.heads:
            object.__setattr__(self, "heads", max(1, self.hidden // HEAD_SIZE))
        for name in ("layers", "hidden", "heads", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"A GPT needs {name} >= 1, not {getattr(self, name)}.")
        if self.hidden % self.heads:
            raise ConfigError(
                f"A GPT's hidden size must divide into its heads: hidden={self.hidden} is no multiple of "
                f"heads={self.heads}. Give heads= a divisor of {self.hidden}."
            )

    def __str__(self) -> str:
        """The text that `parse_gpt` reads."""
        return "gpt:" + ",".join(f"{f.name}={int(getattr(self, f.name))}" for f in fields(self))


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
    """x + attention(norm(x)), then x + mlp(norm(x)). [B, T, hidden] -> the same."""

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
    """Every parameter belongs to a module with `reset_parameters`, so that a model on `meta` can be initialized."""

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
        """tokens: [B, T] int64, T <= context. Returns logits [B, T, vocab].

        With targets, [B, T] int64: the mean loss, fp32.
        """
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_gpt(config: GPTConfig, device: str = "meta") -> GPT:
    """On `meta` it takes no memory: for planning, and for engines that fill it unit by unit."""
    with torch.device(device):
        return GPT(config)


def num_parameters(config: GPTConfig) -> int:
    """Tied weights count once."""
    hidden = config.hidden
    block = 12 * hidden**2 + 13 * hidden
    embeddings = (config.vocab * (1 if config.tied else 2) + config.context) * hidden
    return config.layers * block + embeddings + 2 * hidden


def gpt_of_size(num_wanted: float) -> GPTConfig:
    """A GPT of about that many parameters with the usual proportion, hidden = 128 * layers. Raises ConfigError."""
    if not 1e6 <= num_wanted < math.inf:
        raise ConfigError(f"A model planned by its size has at least 1e6 parameters, not {num_wanted:g}.")
    hidden = max(HEAD_SIZE, round((num_wanted * 128 / 12) ** (1 / 3) / HEAD_SIZE) * HEAD_SIZE)
    one = GPTConfig(layers=1, hidden=hidden)
    per_block = num_parameters(replace(one, layers=2)) - num_parameters(one)
    return replace(one, layers=max(1, round((num_wanted - num_parameters(one)) / per_block) + 1))


def parse_gpt(text: str) -> GPTConfig:
    """'gpt:layers=24,hidden=2048' -> GPTConfig; what is not named keeps its default. Raises ConfigError."""
    family, _, settings = text.partition(":")
    if family.strip() != "gpt":
        raise ConfigError(f"The built-in model is written gpt:layers=24,hidden=2048; found {text!r}.")
    names = [field.name for field in fields(GPTConfig)]
    values: dict[str, int] = {}
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        name, _, number = (part.strip() for part in setting.partition("="))
        if name not in names:
            raise ConfigError(f"A GPT has no setting {name!r}; it has {', '.join(names)}.")
        if name in values:
            raise ConfigError(f"{name} is given twice in {text!r}.")
        try:
            values[name] = int(number)
        except ValueError:
            raise ConfigError(f"{name} must be a whole number, not {number!r} (in {text!r}).") from None
    if values.get("tied", 1) not in (0, 1):
        raise ConfigError(f"tied must be 0 or 1, not {values['tied']}.")
    return GPTConfig(**{**values, "tied": bool(values.get("tied", 1))})  # type: ignore[arg-type]
