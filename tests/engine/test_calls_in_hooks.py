"""Calls of the engine from inside a forward, backward or step(), by hooks of the user: those that need the state
between two steps are refused, those that look at values answer, and the step goes on as if none had been made."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

import tiered_zero
from tests.support.faulty_runs import POLICIES, build, differing
from tests.support.inspection import units_with_gradients
from tests.support.inspection.insides import UnitGradients
from tests.support.models import ParityGPT, batch, named_weights
from tiered_zero.errors import ModelError

NAME = "blocks.0.out.weight"
PLACES = {
    "forward": "forward",
    "direct forward": "forward",
    "backward": "backward",
    "own backward": "backward",
    "before the update": "step",
    "after the update": "step",
}
"""Where the hook is -> what the refusal calls it. Direct and own: called on module and loss, past the engine."""


def refused(engine: tiered_zero.Engine, path: Path) -> dict[str, Callable[[], object]]:
    return {
        "save_checkpoint": lambda: engine.save_checkpoint(path),
        "load_checkpoint": lambda: engine.load_checkpoint(path),
        "save_16bit_model": lambda: engine.save_16bit_model(path),
        "flush": engine.flush,
        "step": engine.step,
        "zero_grad": engine.optimizer.zero_grad,
        "abort_step": engine.abort_step,
        "poke": lambda: engine.poke(NAME, "master", torch.zeros(1)),
        "backward": lambda: engine.backward(torch.zeros(1, requires_grad=True)),
    }


def look(engine: tiered_zero.Engine) -> None:
    for kind in ("master", "grad", "exp_avg"):
        engine.peek(NAME, kind)
    engine.module.state_dict()
    engine.optimizer.state_dict()
    with tiered_zero.gathered(engine.module.get_parameter(NAME)):
        pass


def run(policy: str, place: str, swap_path: Path, act: Callable[[tiered_zero.Engine], object]) -> dict[str, Tensor]:
    """Train four steps; `act` is called once, at `place` in the third. Returns losses and weights."""
    with build(swap_path, policy, lambda: ParityGPT(num_blocks=1)) as engine:
        armed: list[str] = []

        def hook(*names: str) -> Callable[..., None]:
            def fire(*_: object) -> None:
                if armed and armed[0] in names:
                    armed.clear()
                    act(engine)

            return fire

        layer = engine.module.get_submodule("blocks.0.out")
        layer.register_forward_hook(hook("forward", "direct forward"))
        layer.register_full_backward_hook(hook("backward", "own backward"))
        engine.optimizer.register_step_pre_hook(hook("before the update"))
        engine.optimizer.register_step_post_hook(hook("after the update"))
        losses = []
        for number in range(4):
            if number == 2:
                armed.append(place)
            loss = (engine.module if place == "direct forward" else engine)(*batch(number))
            if place == "own backward":
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        assert not armed
        return {"losses": torch.stack(losses), **dict(named_weights(engine.module))}


@cache
def undisturbed(policy: str) -> dict[str, Tensor]:
    with TemporaryDirectory() as path:
        return run(policy, "forward", Path(path), lambda engine: None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", ["barrier", "overlapped"])
def test_a_call_inside_a_pass_is_refused_and_the_pass_goes_on(
    policy: str, place: str, swap_path: Path, tmp_path: Path
) -> None:
    names: list[str] = []

    def call_all(engine: tiered_zero.Engine) -> None:
        calls = refused(engine, tmp_path / "out")
        if place != "own backward":  # where a checkpointed forward is computed again
            calls["forward"] = lambda: engine(*batch(0))
        for name, call in calls.items():
            with pytest.raises(ModelError, match=rf"engine.{name}\(\) was called inside of a {PLACES[place]}, by a"):
                call()
            names.append(name)
        look(engine)

    assert not differing(undisturbed(policy), run(policy, place, swap_path, call_all))
    assert len(names) >= 9 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gradient_assigned_after_the_update_is_dropped_with_the_step(policy: str, swap_path: Path) -> None:
    """While the parameter is guarded, and while it is not."""

    def assign(engine: tiered_zero.Engine) -> None:
        for param in filter(attrgetter("requires_grad"), engine.module.parameters()):
            with suppress(ModelError):  # gradients are hidden where updates begin in backward
                param.grad = torch.ones(param.shape)

    assert not differing(
        run(policy, "forward", swap_path / "none", lambda engine: None),
        run(policy, "after the update", swap_path / "assigned", assign),
    )


def test_gradients_of_a_unit_are_cleared_once_a_step(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared, clear = [], UnitGradients.clear
    with build(swap_path, "barrier", lambda: ParityGPT(num_blocks=1)) as engine:
        units = len(units_with_gradients(engine))
        engine.backward(engine(*batch(0)))
        monkeypatch.setattr(UnitGradients, "clear", lambda unit: cleared.append(unit) or clear(unit))
        engine.step()
    assert units > 1 and len(cleared) == units


@pytest.mark.parametrize("policy", POLICIES)
def test_a_signals_handler_that_saves_in_a_forward_is_refused(policy: str, swap_path: Path, tmp_path: Path) -> None:
    """It gets an error of its own, which ends the forward unless the handler takes it; the next step is unharmed."""

    def save(engine: tiered_zero.Engine) -> None:
        before = signal.signal(signal.SIGUSR2, lambda *_: engine.save_checkpoint(tmp_path))
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
        finally:
            signal.signal(signal.SIGUSR2, before)

    with pytest.raises(ModelError, match=r"inside of a forward, by a hook or a signal's handler.*stop_on_signals"):
        run(policy, "forward", swap_path, save)


def test_what_an_interrupted_direct_forward_has_left_refuses_nothing(swap_path: Path, tmp_path: Path) -> None:
    """Its frame stays open, for torch runs no hook then; the call after it is outside all the same."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with build(swap_path, "barrier", lambda: ParityGPT(num_blocks=1)) as engine:
        engine.backward(engine(*batch(0)))
        engine.step()
        handle = engine.module.get_submodule("blocks.0.out").register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.module(*batch(1))
        handle.remove()
        assert engine.save_checkpoint(tmp_path)
