"""The bytes that a plan says a step writes are those that the run's report counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tiered_zero.plan.placement import written_on_nvme


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("gradients", ["cpu", "nvme"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_written_bytes_are_those_of_the_report(tmp_path: Path, gradients: str, accumulation: int) -> None:
    swap = {"device": "nvme", "nvme_path": str(tmp_path)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {**swap, "max_in_cpu": 0},
            "offload_optimizer": swap,
        },
        "tiered_zero": {"gradients": gradients, "update": "barrier"},
    }
    model = nn.Sequential(*(Block() for _ in range(8)))
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        written = []
        for _ in range(4):
            for _ in range(accumulation):
                engine.backward(engine(torch.ones(1, 64)).square().mean())
                engine.step()
            assert engine.step_report is not None
            written.append(engine.step_report.link_nbytes["disk write"])
        plan = engine.plan
    expected = written_on_nvme(plan.tiers.units, accumulation, in_backward=False)
    assert expected["param"] and expected["state"] and bool(expected["gradient"]) == (gradients == "nvme")
    assert written[-1] == sum(expected.values())
