"""The model that parity is shown on: small, and with everything in it that has broken such runtimes."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 64
LENGTH = 8
HIDDEN = 32


class Block(nn.Module):
    """x + attention, then x + mlp. Its matrices are larger than the least sub-group, so that cuts fall inside them."""

    def __init__(self, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.GELU(), nn.Linear(3 * hidden, hidden)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.query_key_value(self.norm(x)).view(batch, length, 3, 2, hidden // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, hidden)))
        return x + self.dropout(self.mlp(x))


class ParityGPT(nn.Module):
    """A GPT with a tied head (as a module, and called as a function), frozen parameters of two dtypes (one uint8), one
    parameter never used and a layer used in some steps only, and buffers that are not floating point."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.scale = nn.Parameter(torch.rand(HIDDEN) + 0.5, requires_grad=False)
        self.codes = nn.Parameter(torch.randint(0, 256, (LENGTH, HIDDEN), dtype=torch.uint8), requires_grad=False)
        self.never_used = nn.Parameter(torch.randn(5, 7))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.sometimes = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.2)
        self.register_buffer("places", torch.arange(LENGTH))
        self.register_buffer("mask", torch.arange(HIDDEN) % 3 > 0)
        self.register_buffer("offset", torch.rand(HIDDEN))

    def forward(self, tokens: Tensor, targets: Tensor, detour: bool = False) -> Tensor:
        """[B, T] int64 twice -> the mean loss, fp32. `detour`: by way of `sometimes`."""
        x = self.tokens(tokens) * self.scale + (self.offset * self.mask).to(self.scale.dtype)
        x = x + self.codes[self.places].to(x.dtype) / 256
        for block in self.blocks:
            x = block(x)
        if detour:
            x = x + self.sometimes(x)
        x = self.norm(x)
        logits = self.head(x) + 0.5 * F.linear(x.tanh(), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def two_layers() -> nn.Sequential:
    """[B, 8] -> [B, 4], with the same first weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(number: int = 0) -> Tensor:
    """A batch for `two_layers`, [4, 8]; the same for the same number."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def batch(number: int, size: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and targets, [size, T] int64; the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCAB, (size, LENGTH), generator=generator)
    return tokens, (tokens * 3 + 1) % VOCAB


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Two param groups that interleave in every module: matrices decay, the rest does not and learns faster."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    decaying = [param for param in trainable if param.dim() > 1]
    others = [param for param in trainable if param.dim() <= 1]
    return [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad and param.dim() == 2]


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """state_dict in CPU copies, tied names and buffers included."""
    for name, value in model.state_dict().items():
        yield name, value.detach().clone()
