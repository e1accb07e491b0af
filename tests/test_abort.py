"""Where updates begin in backward: one that breaks off."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tiered_zero.train_step import TrainStep
from tiered_zero.update.overlapped import OverlappedPolicy


class _Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if _Breaks.armed:
            raise ValueError("backward breaks")
        return grad


class _Breakable(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](_Breaks.apply(self[1](self[0](x)))).pow(2).mean()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_backward_that_breaks_off_before_any_update_is_a_step_left_out(tier: str, swap_path: Path) -> None:
    """The last module's gradients are complete by then, but its sub-group waits for others: nothing is updated."""
    offload = {"device": tier, "nvme_path": str(swap_path)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": offload, "offload_optimizer": offload}
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "tiered_zero": {"device": "cpu", "unit_size_cap": 1},
    }
    x, found = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), []
    for breaks in (True, False):
        torch.manual_seed(0)
        model = _Breakable(*(nn.Linear(64, 64) for _ in range(3)))
        losses = []
        with tiered_zero.initialize(model=model, config=config)[0] as engine:
            for index in range(4 if breaks else 3):
                _Breaks.armed = breaks and index == 1
                try:
                    loss = engine(x)
                    engine.backward(loss)
                except ValueError:
                    engine.abort_step()
                else:
                    engine.step()
                    losses.append(loss.item())
        found.append(losses)
    assert len(found[0]) == 3 and found[0] == found[1]


@pytest.mark.parametrize("call", ["step", "zero_grad", "abort_step"])
def test_a_call_that_is_interrupted_as_it_begins_leaves_the_step_out(
    call: str, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who catches it repeats the batch: gradients of the first try must not be added. A `zero_grad()` between
    two micro-batches keeps the first."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(swap_path)}},
        "tiered_zero": {"device": "cpu", "update": "barrier"},
    }
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        with tiered_zero.initialize(model=nn.Linear(64, 64), config=config)[0] as engine:

            def interrupt(name: str, engine: tiered_zero.Engine = engine) -> None:
                with monkeypatch.context() as patch, pytest.raises(MemoryError):
                    patch.setattr(TrainStep, "recover", _raise_once(TrainStep.recover))
                    getattr(engine, name)()

            for micro_batch in range(4):
                engine.backward(engine(x).pow(2).mean())
                if interrupted and micro_batch in (0, 2):
                    interrupt(call)
                    engine.backward(engine(x).pow(2).mean())
                engine.step()
                if interrupted and call == "zero_grad":
                    interrupt(call)
            assert engine.global_steps == 2
            found.append((engine.get_global_grad_norm(), engine.module.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_a_backward_that_is_interrupted_as_it_returns_is_left_out(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients were added to those of the batch that the caller repeats."""
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(swap_path)}},
        "tiered_zero": {"device": "cpu"},
    }
    backward = TrainStep.backward

    def made_and_interrupted(step: TrainStep, *args: Any) -> None:
        backward(step, *args)
        raise KeyboardInterrupt

    x, found = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), []
    for interrupted in (False, True):
        torch.manual_seed(0)
        with tiered_zero.initialize(model=nn.Linear(64, 64), config=config)[0] as engine:
            for step in range(3):
                if interrupted and step == 1:
                    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                        patch.setattr(TrainStep, "backward", made_and_interrupted)
                        engine.backward(engine(x).pow(2).mean())
                engine.backward(engine(x).pow(2).mean())
                engine.step()
            found.append((engine.get_global_grad_norm(), engine.module.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def _raise_once(method: Any) -> Any:
    left = [MemoryError()]

    def raise_first(step: TrainStep) -> None:
        if left:
            raise left.pop()
        method(step)

    return raise_first


def test_a_backward_that_is_interrupted_before_its_update_starts_is_left_out(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next backward waits for the last update: it hung where that was the one which had never been launched."""
    offload = {"device": "nvme", "nvme_path": str(swap_path)}
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "tiered_zero": {"device": "cpu"},
    }
    x, found = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), []
    for interrupted in (False, True):
        torch.manual_seed(0)
        with tiered_zero.initialize(model=nn.Linear(64, 64), config=config)[0] as engine:
            for step in range(3):
                if interrupted and step == 1:
                    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                        patch.setattr(OverlappedPolicy, "run_behind", Mock(side_effect=KeyboardInterrupt))
                        engine.backward(engine(x).pow(2).mean())
                engine.backward(engine(x).pow(2).mean())
                engine.step()
            found.append(engine.module.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
