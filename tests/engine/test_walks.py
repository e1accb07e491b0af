"""How many functions of the package the driver thread calls for a step of a tiny model, in how many files, and for each
tensor of one of many tensors. Limits of two layers are what was counted: whoever shortens a walk lowers them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.walks import Walk, host_config, over, record

MOST = {"forward": (196, 16), "backward": (214, 21), "step": (291, 31)}
"""(calls, files)"""
MOST_CALLS_PER_TENSOR = {"forward": 20, "backward": 28, "step": 6}

NUM_WARM_UP_STEPS = 2
"""The first steps initialize state and learn the order of the units."""


def record_step(engine: tiered_zero.Engine, batch: torch.Tensor, *, inside: str | None = None) -> dict[str, Walk]:
    """Record a step after the warm-up. `inside`: see `record`."""
    walks: dict[str, Walk] = {}
    for _ in range(NUM_WARM_UP_STEPS + 1):
        outputs: list[torch.Tensor] = []
        walks["forward"] = record(lambda outputs=outputs: outputs.append(engine(batch)), inside)  # type: ignore[misc]
        output = outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]
        loss = output.square().mean()
        walks["backward"] = record(lambda loss=loss: engine.backward(loss), inside)  # type: ignore[misc]
        walks["step"] = Walk(record(engine.step, inside).calls + record(engine.flush, inside).calls)
    return walks


@pytest.mark.usefixtures("one_thread")
def test_a_step_of_two_layers_stays_short() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiered_zero.initialize(model=model, config=host_config())[0] as engine:
        walks = record_step(engine, torch.randn(2, 8))
    assert over(walks, MOST) == {}


@pytest.mark.usefixtures("one_thread")
def test_a_gradients_way_returns_to_no_room() -> None:
    """From autograd's hook to the gradient's home, and to the update of its unit."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiered_zero.initialize(model=model, config=host_config())[0] as engine:
        way = record_step(engine, torch.randn(2, 8), inside="grad_ready")["backward"]
    assert "native/norms.py" in way.files, "the gradient is copied, and its norm is taken"
    assert way.returns == []


@pytest.mark.usefixtures("one_thread")
def test_a_tensor_costs_few_calls() -> None:
    """24 layers of sixteen small tensors each."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
    config = transformers.BertConfig(num_hidden_layers=24, num_attention_heads=2, **shape)
    model = transformers.BertModel(config, add_pooling_layer=False)
    num_tensors = sum(param.requires_grad for param in model.parameters())
    with tiered_zero.initialize(model=model, config=host_config())[0] as engine:
        walks = record_step(engine, torch.randint(0, 64, (2, 8)))
    per_tensor = {name: len(walk.calls) / num_tensors for name, walk in walks.items()}
    assert {name for name, calls in per_tensor.items() if calls > MOST_CALLS_PER_TENSOR[name]} == set(), per_tensor
