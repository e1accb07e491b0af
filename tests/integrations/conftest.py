"""What the tests of other libraries share: a small GPT-2, its data, and an optimizer of plain torch or of an engine.

The libraries come with `pip install -c constraints.txt -e '.[test,integrations]'`. They are imported inside the tests,
which `pytest -m thorough tests/integrations` chooses: where a library is not installed, its tests fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.trainers import FAR, adamw, tiered
from tiered_zero.optim import OffloadedOptimizer

VOCAB, LENGTH = 30, 6
LOOP = ("loop", "nvme")
"""No engine: parameters where the loop has them, an OffloadedOptimizer's state on nvme."""
PLACES = (("none", "none"), *FAR)
Placement = tuple[str, str] | None
"""None: plain PyTorch."""


def gpt2(num_layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, in each process that collects tests

    torch.manual_seed(0)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=num_layers, n_head=2, n_positions=16, use_cache=False, **drop)
    )


def token_ids(number: int) -> Tensor:
    """[2, LENGTH] int64; the same for the same number."""
    return torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(number))


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """What a language model is trained on, 12 rows."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = token_ids(number)[0]
        return {"input_ids": tokens, "labels": tokens}


@contextmanager
def optimizer_for(model: nn.Module, placement: Placement, swap_path: Path) -> Iterator[Optimizer]:
    """AdamW: of torch, offloaded, or of an engine over `model`; it is closed at the end."""
    if placement is None:
        yield adamw(model)
        return
    if placement == LOOP:
        trained = [param for param in model.parameters() if param.requires_grad]
        offload = {"device": "nvme", "nvme_path": str(swap_path)}
        with OffloadedOptimizer(trained, torch.optim.AdamW, offload, lr=3e-3) as optimizer:
            yield optimizer
        assert not list(swap_path.iterdir())
        return
    with tiered(model, swap_path, placement, adamw, clipping=None) as engine:
        yield engine.optimizer


def copies(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}
