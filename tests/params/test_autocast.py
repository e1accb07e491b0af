"""Under torch.autocast no 16-bit copies of weights pile up, and the program finds autocast's cache as it left it."""

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
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """`how`: where autocast begins, in the program or in the model; `recomputes`: each block in a checkpoint."""

    def __init__(self, how: str, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.how, self.recomputes = how, recomputes
        self.error: BaseException | None = None
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
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        if self.error is not None:
            raise self.error
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


def autocast(how: str, caches: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=how in ("around", "used twice"), cache_enabled=caches)


def build(how: str, recomputes: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(how, recomputes)


def train(trainer: Any, how: str, casts: Casts, caches: bool = True) -> Iterator[torch.Tensor]:
    for _ in range(3):
        with casts, autocast(how, caches):
            loss = trainer(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        with casts:
            trainer.backward(loss)
        trainer.step()
        yield loss.detach()


WAYS = ["around", "made inside", "made before"]


@pytest.mark.parametrize("how", WAYS)
def test_weights_are_cast_one_at_a_time(how: str, swap_path: Path) -> None:
    with tiered(build(how), swap_path, ("cpu", "cpu")) as engine, torch.no_grad():
        with Casts() as casts, autocast(how):
            engine(torch.ones(4, WIDTH))
        assert casts.most_nbytes == CAST_NBYTES
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("how", WAYS)
def test_recomputation_keeps_the_casts_of_one_block_and_plains_numbers(how: str, swap_path: Path) -> None:
    expected = list(train(Plain(build(how, True)), how, Casts()))
    with tiered(build(how, True), swap_path, ("cpu", "cpu")) as engine:
        found = list(train(engine, how, casts := Casts()))
    assert torch.equal(torch.stack(expected), torch.stack(found))
    assert casts.most_nbytes == 2 * CAST_NBYTES, "those that autograd saves in the block that is computed again"
    assert torch.is_autocast_cache_enabled()


def test_a_block_that_is_used_twice_has_plains_numbers_without_the_cache(swap_path: Path) -> None:
    expected = list(train(Plain(build(how := "used twice")), how, Casts(), caches=False))
    with tiered(build(how), swap_path, ("cpu", "cpu")) as engine:
        assert torch.equal(torch.stack(expected), torch.stack(list(train(engine, how, Casts()))))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("direct", [False, True], ids=["engine", "module"])
def test_the_cache_is_as_before_after_an_exception(
    how: str, error: type[BaseException], direct: bool, swap_path: Path
) -> None:
    net = build(how)
    with tiered(net, swap_path, ("cpu", "cpu")) as engine:
        net.error = error()
        with pytest.raises(error), autocast(how):
            (net if direct else engine)(torch.ones(4, WIDTH))
        net.error = None
        with autocast(how):
            engine(torch.ones(4, WIDTH))
        assert torch.is_autocast_cache_enabled()
