"""An exception in forward or backward costs its step and nothing else: the course goes on with plain PyTorch's bits."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiered_zero
from tests.support.inspection import differences, everything, evict_all
from tests.support.models import HIDDEN, VOCAB, Block, batch, rows, two_layers
from tests.support.trainers import FAR, assert_parity, tiered, train


class Trip(Exception):
    """Raised on purpose."""


class TripInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Trip("in backward")


class Fragile(nn.Module):
    """`trip`: None, or (where, block): raises in that block's forward, after using a weight, or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Breaking() for _ in range(4))

    def forward(self, tokens: Tensor, targets: Tensor, trip: tuple[str, int] | None = None) -> Tensor:
        x = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, trip[0] if trip and trip[1] == index else None)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, where: str | None) -> Tensor:
        x = self.inner(x) * self.scale
        if where == "interrupt":
            raise KeyboardInterrupt
        if where == "forward":
            raise Trip("in forward")
        return TripInBackward.apply(x) if where == "backward" else x


def try_step(trainer: Any, number: int, trip: tuple[str, int], direct: bool = False) -> str:
    """A step that breaks off, where `trip` says. Returns what was raised."""
    try:
        loss = trainer(*batch(number), trip)
        loss.backward() if direct else trainer.backward(loss)
    except (Trip, KeyboardInterrupt) as error:
        trainer.abort_step()
        return f"{type(error).__name__} {error}"
    return "nothing"


UNDONE = [(0.5, None), (0.0, "barrier")]
"""(clipping, update policy): where nothing of a step is applied before step(). Without clipping and with the overlapped
policy updates begin in backward; that a backward then cannot be undone is said by a EngineFailedError."""


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
def test_training_goes_on_after_exceptions(direct, accumulation, swap_path):
    """Every two of the three axes meet."""
    clipping, update = UNDONE[(direct + accumulation) % 2]

    def script(trainer):
        seen: list[Any] = []
        for step in range(3):
            for where in ("forward", "backward", "interrupt"):
                if accumulation > 1 and step == 2:  # in the second micro-batch: the first is given up as well
                    trainer.backward(trainer(*batch(70)))
                    trainer.step()
                seen.append(try_step(trainer, 90 + step, (where, step), direct))
            seen += train(trainer, lambda number, step=step: batch(number + 10 * step), 2, accumulation)
        return seen

    options = {"accumulation": accumulation, "clipping": clipping, "runtime": {"update": update}}
    assert_parity(Fragile, script, swap_path, **options)


@pytest.mark.parametrize("where", ["forward", "backward", "interrupt"])
@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_a_broken_step_leaves_every_bit_and_nothing_on_the_device(placement, where, swap_path):
    with tiered(Fragile(), swap_path, placement, clipping=0.5) as engine:
        train(engine, batch, 2)
        before = everything(engine)
        assert "nothing" not in try_step(engine, 5, (where, 2))
        assert not differences(before, everything(engine))
        device = engine.memory_report()["device"]
        assert device.get("gradient_in_flight", {"now": 0})["now"] == 0
        assert device["param_window"]["now"] <= device["param_window"]["planned"]
        evict_all(engine)
        assert engine.memory_report()["device"]["param_window"]["now"] == 0, "a broken step holds on to a unit"


def test_a_backward_that_cannot_be_undone_says_so(swap_path):
    with tiered(Fragile(), swap_path) as engine:
        train(engine, batch, 2)
        assert "Trip" in try_step(engine, 5, ("backward", 1))
        with pytest.raises(tiered_zero.errors.EngineFailedError, match="optimizer_in_backward"):
            engine(*batch(0))


def test_no_grad_inside_and_early_returns(swap_path):
    """Leaving by exception out of a nested module call, caught by the model itself, goes on in the same forward."""

    class Catching(Fragile):
        def forward(self, tokens: Tensor, targets: Tensor, trip: tuple[str, int] | None = None) -> Tensor:
            x = self.tokens(tokens)
            for index, block in enumerate(self.blocks):
                try:
                    x = block(x, "forward" if index % 2 else None)
                except Trip:
                    with torch.no_grad():
                        x = x + block.inner(x).mean()
            return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())

    assert_parity(Catching, lambda own: train(own, batch), swap_path)


@pytest.mark.parametrize("placement", [("none", "none"), *FAR])
def test_a_gathered_block_that_raises_loses_its_changes_and_says_so(
    placement: tuple[str, str], swap_path: Path
) -> None:
    model = two_layers()
    before = model[0].weight.detach().clone()
    with tiered(model, swap_path, placement) as engine:
        outer, inner = (tiered_zero.gathered(part, modify=True) for part in (model, model[0].weight))
        with pytest.raises(Trip) as raised, outer, inner, torch.no_grad():
            model[0].weight.fill_(7)
            raise Trip("after a change")
        engine.backward(engine(rows()).square().mean())
        engine.step()  # until then the device shows it where the parameter lives there
        assert (engine.module.state_dict()["0.weight"] - before).abs().max() < 0.01
    notes = getattr(raised.value, "__notes__", [])
    assert [note.partition(":")[0] for note in notes] == (
        ["What this block of tiered_zero.gathered(modify=True) has changed is lost"]
        if sys.version_info >= (3, 11)
        else []
    )
