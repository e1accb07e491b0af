"""close() leaves parameters that rest on the device with the bits of the last step, and makes nothing else for it."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.test_optimizers import WHOLE
from tests.support.inspection import delay_from_now_on, pipeline, units_on_device
from tests.support.models import ParityGPT, batch
from tests.support.trainers import Plain, adamw, same_bits, tiered, train
from tiered_zero.errors import ModelError, ParameterOffloadedError

RESIDENT_NUMEL = 200
"""Parameters with fewer elements rest on the device: norms and biases of every block, in sub-groups with others."""


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT(num_blocks=2)


def data(first: int, number: int) -> tuple[Any, ...]:
    return (*batch(first + number), False)


class HeldUpdates:
    """No update begins until the engine ends; counts the elements that are updated then."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numel = 0
        own = pipeline(engine)
        step, update = own.step, own._rule.update

        def held_step(job: Any) -> None:
            assert own._ending.wait(60)
            step(job)

        def count(runs: Any) -> None:
            self.numel += sum(run.master.numel() for run in runs)
            update(runs)

        monkeypatch.setattr(own, "step", held_step)
        monkeypatch.setattr(own._rule, "update", count)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("state", ["cpu", "nvme"])
@pytest.mark.parametrize("update", ["overlapped", "delayed"])
def test_what_stays_visible_is_finished_and_the_rest_is_given_up(
    update: str, state: str, clipping: float, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every three of update, tier, clipping and rule (elementwise, or of whole parameters) meet."""
    make_optimizer = (adamw, WHOLE["RowScaled"])[((update == "delayed") + (state == "nvme") + (clipping > 0)) % 2]
    steps = 2
    runtime = {"update": update, "delay_start_step": 99} if update == "delayed" else {"update": update}
    zero = {"stage3_param_persistence_threshold": RESIDENT_NUMEL}
    plain = Plain(build(), make_optimizer, clipping=clipping)
    train(plain, partial(data, 0), steps + 1)
    engine = tiered(build(), swap_path, ("nvme", state), make_optimizer, 1, clipping, zero=zero, runtime=runtime)
    train(engine, partial(data, 0), steps)
    engine.flush()
    if update == "delayed":
        delay_from_now_on(engine)
    held = HeldUpdates(engine, monkeypatch)
    train(engine, partial(data, steps), 1)
    resident = [unit for unit in units_on_device(engine) if unit.trainable]
    model: nn.Module = engine.module
    engine.close()
    expected = dict(plain.module.named_parameters())
    found = {name: param for name, param in model.named_parameters() if type(param) is nn.Parameter}
    names = {entry.param.name for unit in resident for entry in unit.entries}
    assert len(names) > 10 and names <= found.keys()
    assert all(same_bits(expected[name], found[name]) for name in names)
    assert 0 < held.numel <= sum(unit.numel for unit in resident)
    assert not any(swap_path.iterdir())


def test_an_update_under_way_drops_what_it_has_read(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed while its first sub-group is updated: that one is finished, and no other is begun."""
    engine = tiered(build(), swap_path, ("nvme", "nvme"), adamw, 1, 1.0, runtime={"update": "overlapped"})
    train(engine, partial(data, 0), 2)
    engine.flush()
    own = pipeline(engine)
    begun, numel = threading.Event(), []
    update = own._rule.update

    def wait_for_the_end(runs: Any) -> None:
        begun.set()
        assert own._ending.wait(60)
        numel.append(sum(run.master.numel() for run in runs))
        update(runs)

    monkeypatch.setattr(own._rule, "update", wait_for_the_end)
    train(engine, partial(data, 2), 1)
    assert begun.wait(60)
    engine.close()
    assert len(numel) == 1
    assert not any(swap_path.iterdir())


def test_a_graph_outlives_its_engine_where_the_weights_do(swap_path: Path) -> None:
    plain = Plain(build(), adamw)
    plain(*data(0, 0)).backward()
    engine = tiered(build(), swap_path, ("none", "nvme"), adamw)
    loss, model = engine(*data(0, 0)), engine.module
    engine.close()
    loss.backward()
    expected = {name: param.grad for name, param in plain.module.named_parameters() if param.grad is not None}
    found = dict(model.named_parameters())
    assert all(same_bits(grad, found[name].grad) for name, grad in expected.items()) and len(expected) > 10
    engine = tiered(build(), swap_path, ("none", "nvme"), adamw)
    loss = engine(*data(0, 0))
    train(engine, partial(data, 0), 1)
    engine.close()
    with pytest.raises(ModelError, match="have changed since"):
        loss.backward()
    engine = tiered(build(), swap_path, ("nvme", "nvme"), adamw)
    loss = engine(*data(0, 0))
    engine.close()
    with pytest.raises(ParameterOffloadedError, match="an engine that is closed"):
        loss.backward()
