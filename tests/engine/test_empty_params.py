"""A trained parameter without elements is in no unit, and everything that names parameters has it all the same."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import tiered_zero
from tests.support.configs import config_of, zero_section
from tiered_zero.deepspeed.utils import safe_get_full_fp32_param


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs)).square().mean()


def test_an_empty_parameter_is_in_every_format(tmp_path: Path) -> None:
    model = Model()
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    optimizer = torch.optim.NAdam(model.parameters())
    with tiered_zero.initialize(model=model, optimizer=optimizer, config=config_of(zero_section("cpu", "cpu")))[
        0
    ] as engine:
        engine.backward(engine(torch.randn(2, 4)))
        engine.step()
        weights = engine.module.state_dict()
        assert {name: tuple(value.shape) for name, value in weights.items()} == expected
        engine.module.load_state_dict(weights)
        assert copy.deepcopy(engine.module).empty.shape == (0, 3)
        assert safe_get_full_fp32_param(model.empty) is None
        engine.save_checkpoint(tmp_path, tag="tag")
        engine.load_checkpoint(tmp_path, tag="tag")
        engine.save_16bit_model(tmp_path, "model.safetensors")
        saved = load_file(tmp_path / "model.safetensors")
        assert {name: tuple(value.shape) for name, value in saved.items()} == expected
        assert all(torch.equal(saved[name], weights[name]) for name in expected)
