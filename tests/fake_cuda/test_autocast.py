"""torch.autocast keeps no 16-bit copies of paged weights on the device where reentrant checkpoints recompute them."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda.child import FakeCuda, FakeCudaProcesses
from tests.fake_cuda.training import Tower, batch, build

pytestmark = pytest.mark.cuda_wheel

NUM_LAYERS, WIDTH = 24, 1024
CAST_NBYTES = 2 * WIDTH * (WIDTH + 1)
"""Of a layer in 16 bits."""

ACTIVATION_NBYTES = 1 << 20
"""More than all activations of so few rows, and the allocator's rounding."""


NO_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:1", "CUBLASLT_WORKSPACE_SIZE": "0"}
"""Else torch's own for matrix products are the largest of all, and in no plan."""


def train(device: FakeCuda, enabled: bool, swap_path: str) -> None:
    with build(Tower(NUM_LAYERS, WIDTH, recompute=True), "cpu/cpu", swap_path) as engine:
        planned, peaks = engine.plan.nbytes("device"), {}
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                loss = engine(batch(engine))
            peaks["forward"] = torch.cuda.max_memory_allocated()
            engine.backward(loss)
            engine.step()
            peaks["step"] = torch.cuda.max_memory_allocated()
    casts = 2 * CAST_NBYTES if enabled else 0
    print(f"autocast {enabled}: planned {planned}, peaks {peaks}, copies of all weights {NUM_LAYERS * CAST_NBYTES}")
    for name, peak in peaks.items():
        assert peak <= planned + casts + ACTIVATION_NBYTES, f"{name}: {peak} bytes, planned {planned}"


@pytest.mark.parametrize("enabled", [False, True])
def test_the_peak_under_autocast_is_near_the_plan(fake_cuda: FakeCudaProcesses, enabled: bool, swap_path: str) -> None:
    """fp32 parameters, each layer in a reentrant checkpoint: beside the plan are copies of two layers at most."""
    fake_cuda.run(train, NO_WORKSPACES, enabled=enabled, swap_path=swap_path)
