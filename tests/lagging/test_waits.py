"""How often the host waits for a device that lags: at most once for each unit, and a number that no depth changes.

Bounds hold for every order of events: a transfer is waited for once, whoever waits, and not at all once it is seen to
be complete. How many of those are complete by then depends on time, and no test asks for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.lagging.ranks import on_ranks
from tests.support.inspection.insides import gradient
from tests.support.trainers import adamw, tiered

NUM_MATRICES = 12
SIDE = 32
FEW, MANY = 3, 9
"""Blocks, each a unit."""

CONSTANT = 6
"""Waits of a step besides: the loss, the norm, the last units' gradients, the end of the update."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(NUM_MATRICES):  # in a ModuleList each would be a unit
            self.add_module(f"matrix{number}", nn.Linear(SIDE, SIDE, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([matrix(x) for matrix in self.children()]).mean(0)


@dataclass(frozen=True, kw_only=True)
class Step:
    """`gradients`: the tier that they rest on."""

    clipping: float = 0.0
    accumulation: int = 1
    gradients: str = "cpu"
    state: str = "cpu"
    policy: str = "overlapped"


def count_waits(device: LaggingDevice, engine: Any, accumulation: int) -> int:
    """The host's waits for the device in a step, by all threads, until its update is over. Backward is far ahead of the
    copies."""
    x = torch.ones(2, SIDE, device=engine.device)
    for number in range(3):
        engine.flush()
        device.take_counts()
        device.set(d2h_bytes_per_s=40e6 if number == 2 else 0)
        for _ in range(accumulation):
            engine.backward(engine(x).square().mean())
            engine.step()
    engine.flush()
    counts = device.take_counts()
    device.set(d2h_bytes_per_s=0)
    return sum(count for name, count in counts.items() if name.startswith("host_wait."))


def check(device: LaggingDevice, step: Step, open_engine: Callable[[nn.Module], Any]) -> None:
    """Each gradient leaves by itself, and the waits lie below a line of slope 1, in each backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient, "BATCH_NBYTES", 1024)
        for num_blocks in (FEW, MANY):
            torch.manual_seed(0)
            with open_engine(nn.Sequential(*(Block() for _ in range(num_blocks)))) as engine:
                waits = count_waits(device, engine, step.accumulation)
                assert engine.plan.in_flight_nbytes < 3 * NUM_MATRICES * SIDE * SIDE * 4, "a block is a unit"
            most = step.accumulation * num_blocks + CONSTANT
            assert waits <= most, f"{waits} waits of {num_blocks} units"


STEPS = {
    "updates in backward": Step(),
    "clipping": Step(clipping=1.0),
    "barrier": Step(clipping=1.0, policy="barrier"),
    "sums in host memory": Step(accumulation=2, clipping=1.0),
    "state on NVMe": Step(clipping=1.0, state="nvme"),
    "gradients on NVMe": Step(gradients="nvme", state="nvme"),
    "gradients on NVMe, clipping": Step(gradients="nvme", state="nvme", clipping=1.0),
    "sums on NVMe": Step(gradients="nvme", state="nvme", accumulation=2, clipping=1.0),
}


@pytest.mark.parametrize("name", STEPS)
@on_device
def test_the_host_waits_once_for_each_units_gradients(device: LaggingDevice, swap_path: Path, name: str) -> None:
    step = STEPS[name]
    runtime = {"device": "cuda", "update": step.policy, "gradients": step.gradients, "unit_size_cap": 1 << 16}
    options: Any = {"zero": {"stage3_param_persistence_threshold": 0}, "runtime": runtime}

    def open_engine(model: nn.Module) -> Any:
        path = swap_path / str(len(list(model.children())))
        return tiered(model, path, ("cpu", step.state), adamw, step.accumulation, step.clipping, **options)

    check(device, step, open_engine)


@pytest.mark.parametrize(("stage", "name"), [(2, "clipping"), (3, "clipping"), (3, "sums in host memory")])
@on_ranks
def test_ranks_wait_once_for_each_units_gradients(device: LaggingDevice, stage: int, name: str) -> None:
    step = STEPS[name]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": step.accumulation,
        "gradient_clipping": step.clipping,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu"},
            **({"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0} if stage == 3 else {}),
            "reduce_bucket_size": NUM_MATRICES * SIDE * SIDE,
        },
        "tiered_zero": {"device": "cuda", "host_memory_limit": "1GiB", "unit_size_cap": 1 << 16},
    }

    def open_engine(model: nn.Module) -> Any:
        return tiered_zero.initialize(model=model, optimizer=adamw(model), config=config)[0]

    check(device, step, open_engine)
