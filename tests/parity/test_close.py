"""close() finishes the last update: parameters that rest on the device have its bits."""

from __future__ import annotations

import time
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


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("state", ["cpu", "nvme"])
@pytest.mark.parametrize("update", ["overlapped", "delayed"])
def test_the_last_update_is_finished(
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
    own = pipeline(engine)
    step = own.step
    monkeypatch.setattr(own, "step", lambda job: time.sleep(0.1) or step(job))
    train(engine, partial(data, steps), 1)
    resident = [unit for unit in units_on_device(engine) if unit.trainable]
    model: nn.Module = engine.module
    engine.close()
    expected = dict(plain.module.named_parameters())
    found = {name: param for name, param in model.named_parameters() if type(param) is nn.Parameter}
    names = {entry.param.name for unit in resident for entry in unit.entries}
    assert len(names) > 10 and names <= found.keys()
    assert all(same_bits(expected[name], found[name]) for name in names)
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
