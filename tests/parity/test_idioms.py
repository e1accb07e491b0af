"""PyTorch's idioms around gradients, on plain PyTorch and on the engine: the same bits, or an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.trainers import Plain, assert_same_bits, follow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = {
    "device": ("none", "none"),
    "host": ("cpu", "cpu"),
    "nvme": ("nvme", "nvme"),
    "state on nvme": ("none", "nvme"),
}
UPDATES: dict[str, dict[str, Any]] = {
    "barrier": {"update": "barrier"},
    "overlapped": {"update": "overlapped", "optimizer_in_backward": False},
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch(number: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def loss_of(trainer: Any, number: int, scale: float = 1.0) -> Tensor:
    return trainer(batch(number, scale)).square().mean()


def one(trainer: Any, number: int) -> float | None:
    trainer.backward(loss_of(trainer, number))
    trainer.step()
    norm: float | None = trainer.get_global_grad_norm()
    return norm


Idiom = Callable[[Any], list[Any]]
IDIOMS: list[Idiom] = []


def idiom(function: Idiom) -> Idiom:
    IDIOMS.append(function)
    return function


@idiom
def drop_a_bad_batch(trainer: Any) -> list[Any]:
    seen = [one(trainer, 0)]
    trainer.backward(loss_of(trainer, 1, scale=100.0))
    trainer.optimizer.zero_grad()
    return [*seen, one(trainer, 2), one(trainer, 3)]


@idiom
def zero_grad_at_every_place(trainer: Any) -> list[Any]:
    seen = []
    for number in range(3):
        trainer.optimizer.zero_grad()
        loss = loss_of(trainer, number)
        trainer.optimizer.zero_grad()
        trainer.backward(loss)
        trainer.step()
        seen.append(trainer.get_global_grad_norm())
        trainer.optimizer.zero_grad()
    return seen


@idiom
def a_hook_that_raises_once(trainer: Any) -> list[Any]:
    """The gradient of its parameter stays on it in plain PyTorch, until zero_grad()."""
    raises = [True]

    def hook(param: nn.Parameter) -> None:
        if raises.pop() if raises else False:
            raise ValueError("broken off")

    handle = trainer.module[2].weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ValueError, match="broken off"):
        trainer.backward(loss_of(trainer, 0))
    trainer.optimizer.zero_grad()
    assert all(param.grad is None for param in trainer.module.parameters())
    seen = [one(trainer, 1), one(trainer, 2)]
    handle.remove()
    return [*seen, one(trainer, 3)]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", IDIOMS, ids=lambda function: function.__name__)
def test_the_bits_are_plain_pytorchs(function: Idiom, place: str, update: str, swap_path: Path) -> None:
    expected = follow(function, Plain(build(), momentum))
    engine = tiered(build(), swap_path, PLACES[place], momentum, runtime=UPDATES[update])
    assert_same_bits(expected, follow(function, engine))
