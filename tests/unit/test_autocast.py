"""Under torch.autocast numbers are plain PyTorch's, and no 16-bit copies of weights pile up without grad mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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

Uses = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


class Net(nn.Module):
    """`how`: where autocast begins, in the program or in the model; `uses`: what the model computes of its blocks."""

    def __init__(self, how: str, uses: Uses) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.how, self.uses = how, uses
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
        return self.uses(self.blocks, x).float().square().mean()


def each_once(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def each_in_a_reentrant_checkpoint(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x.requires_grad_(), use_reentrant=True)
    return x


def one_without_grad_between_uses(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    x = blocks[0](x)
    with torch.no_grad():
        target = each_once(blocks[2:], x)
    return blocks[1](blocks[0](x)) + target


def each_in_two_checkpoints(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
    return x


def one_in_a_checkpoint_and_again_outside(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        x = checkpoint(blocks[0], x, use_reentrant=False)
    return each_once(blocks, checkpoint(blocks[0], x, use_reentrant=False))


def one_used_again_after_reentrant_checkpoints(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    x = blocks[0](x)
    return blocks[0](each_in_a_reentrant_checkpoint(blocks[1:], x))


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
    return torch.autocast("cpu", torch.bfloat16, enabled=how == "around")


def build(how: str, uses: Uses = each_once) -> Net:
    torch.manual_seed(0)
    return Net(how, uses)


def train(trainer: Any, how: str, casts: Casts) -> dict[str, torch.Tensor]:
    """Return the weights after three steps."""
    for _ in range(3):
        with casts, autocast(how):
            loss = trainer(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        with casts:
            trainer.backward(loss)
        trainer.step()
    return {name: value.clone() for name, value in trainer.module.state_dict().items()}


WAYS = ["around", "made inside", "made before"]


@pytest.mark.parametrize("how", WAYS)
def test_evaluation_keeps_the_cast_of_one_weight(how: str, swap_path: Path) -> None:
    with tiered(build(how), swap_path, ("cpu", "cpu")) as engine, torch.no_grad():
        with Casts() as casts, autocast(how):
            engine(torch.ones(4, WIDTH))
        assert casts.most_nbytes == CAST_NBYTES


@pytest.mark.parametrize("how", WAYS)
def test_a_reentrant_checkpoint_keeps_the_casts_of_one_block(how: str, swap_path: Path) -> None:
    expected = train(Plain(build(how, each_in_a_reentrant_checkpoint)), how, Casts())
    with tiered(build(how, each_in_a_reentrant_checkpoint), swap_path, ("cpu", "cpu")) as engine:
        found = train(engine, how, casts := Casts())
    assert_same(expected, found)
    assert casts.most_nbytes == 2 * CAST_NBYTES, "those that autograd saves in the block that is computed again"


@pytest.mark.parametrize(
    "uses",
    [
        one_without_grad_between_uses,
        each_in_two_checkpoints,
        one_in_a_checkpoint_and_again_outside,
        one_used_again_after_reentrant_checkpoints,
    ],
)
def test_gradients_of_several_uses_are_summed_as_in_plain_pytorch(uses: Uses, swap_path: Path) -> None:
    """In 16 bits, at the node of the cast that they share."""
    expected = train(Plain(build("around", uses)), "around", plain := Casts())
    with tiered(build("around", uses), swap_path, ("cpu", "cpu")) as engine:
        found = train(engine, "around", casts := Casts())
    assert_same(expected, found)
    assert casts.most_nbytes <= plain.most_nbytes


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_evaluation_that_fails_leaves_autocasts_cache_on(error: type[BaseException], swap_path: Path) -> None:
    def fail(*_: Any) -> None:
        assert not torch.is_autocast_cache_enabled()
        raise error

    net = build("around")
    net.own = nn.Parameter(torch.zeros(WIDTH))  # the model's own frame is one with units too
    with tiered(net, swap_path, ("cpu", "cpu")) as engine, torch.no_grad():
        net.blocks[1].down.register_forward_pre_hook(fail)
        with pytest.raises(error):
            engine(torch.ones(4, WIDTH))
        assert torch.is_autocast_cache_enabled()


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]


def test_parameters_on_the_device_keep_autocasts_cache(swap_path: Path) -> None:
    with tiered(build("around"), swap_path, ("none", "cpu")) as engine, torch.no_grad():
        with Casts() as casts, autocast("around"):
            engine(torch.ones(4, WIDTH))
        assert casts.most_nbytes == 2 * NUM_BLOCKS * CAST_NBYTES
