"""How many functions of the package the driver thread calls for a step of a tiny model, and for each tensor of one of
many tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.walks import count_calls, host_config, over
from tiered_zero.engine.engine import Engine

MOST_CALLS = {"forward": 200, "backward": 220, "step": 300}
MOST_CALLS_PER_TENSOR = {"forward": 20, "backward": 28, "step": 6}

NUM_WARM_UP_STEPS = 2
"""The first steps initialize state and learn the order of the units."""


def count_step(engine: Engine, batch: torch.Tensor) -> dict[str, float]:
    """Count the calls of a step after the warm-up."""
    counted: dict[str, float] = {}
    for _ in range(NUM_WARM_UP_STEPS + 1):
        outputs: list[torch.Tensor] = []
        counted["forward"] = count_calls(lambda outputs=outputs: outputs.append(engine(batch)))  # type: ignore[misc]
        output = outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]
        loss = output.square().mean()
        counted["backward"] = count_calls(lambda loss=loss: engine.backward(loss))  # type: ignore[misc]
        counted["step"] = count_calls(engine.step) + count_calls(engine.flush)
    return counted


@pytest.mark.usefixtures("one_thread")
def test_a_step_of_two_layers_stays_short() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with tiered_zero.initialize(model=model, config=host_config())[0] as engine:
        counted = count_step(engine, torch.randn(2, 8))
    assert over(counted, MOST_CALLS) == {}, counted


@pytest.mark.usefixtures("one_thread")
def test_a_tensor_costs_few_calls() -> None:
    """24 layers of sixteen small tensors each."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
    config = transformers.BertConfig(num_hidden_layers=24, num_attention_heads=2, **shape)
    model = transformers.BertModel(config, add_pooling_layer=False)
    num_tensors = sum(param.requires_grad for param in model.parameters())
    with tiered_zero.initialize(model=model, config=host_config())[0] as engine:
        counted = count_step(engine, torch.randint(0, 64, (2, 8)))
    per_tensor = {name: calls / num_tensors for name, calls in counted.items()}
    assert over(per_tensor, MOST_CALLS_PER_TENSOR) == {}, per_tensor
