"""Under torch.autocast no 16-bit copies of weights pile up that backward does not need."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.trainers import Plain, tiered

WIDTH, NUM_BLOCKS = 48, 6
CAST_NBYTES = WIDTH * WIDTH * 2
"""Of a weight, in 16 bits."""


class Block(nn.Module):
    """`recomputes`: the second layer in a checkpoint."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


class Net(nn.Module):
    """`how`: where autocast begins, in the program or in the model; `recomputes`: "block" or "reentrant": each in a
    checkpoint; "inside": a part of each."""

    def __init__(self, how: str, recomputes: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recomputes == "inside") for _ in range(NUM_BLOCKS))
        self.how, self.recomputes = how, recomputes
        self.made_before = torch.autocast("cpu", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "made inside":
            with torch.autocast("cpu", torch.bfloat16):
                return self.compute(x)
        if self.how == "made before":  # as frameworks wrap a model's forward
            with self.made_before:
                return self.compute(x)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *(self.blocks[:1] if self.how == "used twice" else ())):
            if self.recomputes in ("block", "reentrant"):
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.recomputes == "reentrant")
            else:
                x = block(x)
        return x.float().square().mean()


class Casts(TorchDispatchMode):
    """Counts the bytes of weights in 16 bits that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.most_nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and out.shape == (WIDTH, WIDTH) and out.dtype == torch.bfloat16:
            self.nbytes += out.nbytes
            self.most_nbytes = max(self.most_nbytes, self.nbytes)
            weakref.finalize(out.untyped_storage(), self._end, out.nbytes)
        return out

    def _end(self, nbytes: int) -> None:
        self.nbytes -= nbytes


def autocast(how: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=how in ("around", "used twice"))


def build(how: str, recomputes: str = "") -> Net:
    torch.manual_seed(0)
    return Net(how, recomputes)


def train(trainer: Any, how: str, casts: Casts) -> Iterator[torch.Tensor]:
    for _ in range(3):
        with casts, autocast(how):
            loss = trainer(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        with casts:
            trainer.backward(loss)
        trainer.step()
        yield loss.detach()


WAYS = ["around", "made inside", "made before"]


@pytest.mark.parametrize("how", WAYS)
def test_evaluation_keeps_the_casts_of_one_block(how: str, swap_path: Path) -> None:
    with tiered(build(how), swap_path, ("cpu", "cpu")) as engine, torch.no_grad():
        with Casts() as casts, autocast(how):
            engine(torch.ones(4, WIDTH))
        assert casts.most_nbytes == 2 * CAST_NBYTES


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("recomputes", ["block", "reentrant", "inside"])
def test_recomputation_keeps_the_casts_of_one_block_and_plains_numbers(
    how: str, recomputes: str, swap_path: Path
) -> None:
    expected = list(train(Plain(build(how, recomputes)), how, Casts()))
    with tiered(build(how, recomputes), swap_path, ("cpu", "cpu")) as engine:
        found = list(train(engine, how, casts := Casts()))
    assert torch.equal(torch.stack(expected), torch.stack(found))
    assert casts.most_nbytes == 2 * CAST_NBYTES, "those that autograd saves in the block that is computed again"


def test_a_block_that_is_used_twice_is_cast_once_as_in_plain_pytorch(swap_path: Path) -> None:
    """Its gradients are summed in 16 bits."""
    expected = list(train(Plain(build(how := "used twice")), how, plain := Casts()))
    with tiered(build(how), swap_path, ("cpu", "cpu")) as engine:
        found = list(train(engine, how, casts := Casts()))
    assert torch.equal(torch.stack(expected), torch.stack(found))
    assert casts.most_nbytes == plain.most_nbytes == 2 * NUM_BLOCKS * CAST_NBYTES


def test_parameters_on_the_device_keep_autocasts_cache(swap_path: Path) -> None:
    with tiered(build("around"), swap_path, ("none", "cpu")) as engine, torch.no_grad():
        with Casts() as casts, autocast("around"):
            engine(torch.ones(4, WIDTH))
        assert casts.most_nbytes == 2 * NUM_BLOCKS * CAST_NBYTES
