"""`loss.backward()` and `engine.scale(loss).backward()` in place of `engine.backward(loss)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.support.trainers import assert_same_bits, follow, tiered
from tiered_zero.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 2}
places = pytest.mark.parametrize("place", [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)


def build(swap_path: Path, place: tuple[str, str], **more: Any) -> tiered_zero.Engine:
    torch.manual_seed(0)
    return tiered(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), swap_path, place, **more)


Begin = Callable[[tiered_zero.Engine, Tensor], Any]
BEGINS: dict[str, Begin] = {
    "engine.backward": lambda engine, loss: engine.backward(loss),
    "loss.backward": lambda _, loss: loss.backward(),
    "scale": lambda engine, loss: engine.scale(loss).backward(),
}


def train(begin: Begin, accumulation: int, dtype: torch.dtype = torch.float32) -> Callable[[Any], list[Any]]:
    def script(engine: tiered_zero.Engine) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            for part in range(accumulation):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + part)).to(dtype)
                loss = engine(x).float().square().mean()
                begin(engine, loss)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                seen.append(loss.detach())
            seen.append(engine.get_global_grad_norm())
        return seen

    return script


@pytest.mark.parametrize(
    ("begin", "accumulation", "place"),
    [
        (begin, accumulation, place)
        for begin in list(BEGINS)[1:]
        for accumulation, place in ((1, ("none", "none")), (4, ("cpu", "cpu")), (1, ("nvme", "nvme")))
    ],
)
def test_every_way_to_begin_gives_the_same_bits(
    begin: str, accumulation: int, place: tuple[str, str], swap_path: Path
) -> None:
    expected = follow(
        train(BEGINS["engine.backward"], accumulation), build(swap_path, place, accumulation=accumulation)
    )
    found = follow(train(BEGINS[begin], accumulation), build(swap_path, place, accumulation=accumulation))
    assert_same_bits(expected, found)


@places
def test_a_scaled_loss_is_right_in_fp16(place: tuple[str, str], swap_path: Path) -> None:
    runs = [
        follow(train(BEGINS[name], 2, torch.float16), build(swap_path, place, accumulation=2, fp16=FP16))
        for name in ("engine.backward", "scale")
    ]
    assert_same_bits(*runs)


@places
def test_an_unscaled_loss_is_refused_in_fp16(place: tuple[str, str], swap_path: Path) -> None:
    """Nothing of it stays."""

    def script(engine: tiered_zero.Engine, breaks: bool) -> list[Any]:
        seen = train(BEGINS["engine.backward"], 1, torch.float16)(engine)
        if breaks:
            scaler = torch.amp.GradScaler("cpu")
            for loss_of in (lambda x: engine(x).mean(), lambda x: scaler.scale(engine(x).mean())):
                with pytest.raises(ModelError, match=r"Loss scaling is required.*engine\.scale\(loss\).*GradScaler"):
                    loss_of(torch.ones(4, 8, dtype=torch.float16)).backward()
                assert all(param.grad is None for param in engine.module.parameters())
        return seen + train(BEGINS["engine.backward"], 1, torch.float16)(engine)

    runs = [
        follow(lambda engine, breaks=breaks: script(engine, breaks), build(swap_path, place, fp16=FP16))
        for breaks in (False, True)
    ]
    assert_same_bits(*runs)


def test_a_loss_is_not_scaled_twice(swap_path: Path) -> None:
    with build(swap_path, ("cpu", "cpu"), accumulation=2) as engine:
        loss = engine(torch.ones(4, 8)).square().mean()
        with pytest.raises(ModelError, match=r"scales the loss itself.*engine\.scale\(\) had scaled"):
            engine.backward(engine.scale(loss))
        assert all(param.grad is None for param in engine.module.parameters())


class _Interrupted(BaseException):
    pass


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("begin", "place"),
    [("engine.backward", ("cpu", "cpu")), ("loss.backward", ("none", "none")), ("loss.backward", ("nvme", "nvme"))],
)
def test_nothing_is_left_of_a_backward_that_an_own_hook_broke_off(
    number: int, begin: str, place: tuple[str, str], swap_path: Path
) -> None:
    """Hooks registered before the run started, and after; an interrupt in place of an error."""
    runs = []
    for breaks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        armed: list[bool] = []

        def hook(param: nn.Parameter, armed: list[bool] = armed) -> None:
            if armed:
                armed.clear()
                raise _Interrupted

        param = list(model.parameters())[number]
        if number % 2:
            param.register_post_accumulate_grad_hook(hook)

        def script(engine: tiered_zero.Engine, breaks: bool = breaks, armed: list[bool] = armed) -> list[Any]:
            seen = train(BEGINS[begin], 1)(engine)
            if breaks:
                armed.append(True)
                with pytest.raises(_Interrupted):
                    BEGINS[begin](engine, engine(torch.ones(4, 8)).mean())
                engine.zero_grad()
                assert all(param.grad is None for param in engine.module.parameters())
            return seen + train(BEGINS[begin], 1)(engine)

        engine = tiered(model, swap_path, place, runtime={"optimizer_in_backward": False})
        if number % 2 == 0:
            param.register_post_accumulate_grad_hook(hook)
        runs.append(follow(script, engine))
    assert_same_bits(*runs)


@places
def test_a_gradient_with_a_graph_is_refused_and_training_goes_on(place: tuple[str, str], swap_path: Path) -> None:
    """A penalty on `param.grad`, beside another loss, would lose its gradient without a word."""

    def script(breaks: bool) -> Callable[[Any], list[Any]]:
        def train_on(engine: Any) -> list[Any]:
            if breaks:
                with pytest.raises(ModelError, match=r"create_graph=True.* torch\.autograd\.grad"):
                    engine(torch.ones(4, 8)).square().mean().backward(create_graph=True)
                engine.zero_grad()
                assert all(param.grad is None for param in engine.module.parameters())
            return train(BEGINS["engine.backward"], 1)(engine)

        return train_on

    assert_same_bits(*(follow(script(breaks), build(swap_path, place, clipping=1.0)) for breaks in (False, True)))
