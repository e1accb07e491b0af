"""Every placement starts, trains and ends on the allocator, streams and threads of a CUDA build of torch."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.fake_cuda.child import FakeCuda, on_fake_cuda
from tests.fake_cuda.training import PLACEMENTS, Tower, build, is_same, step, weights

pytestmark = pytest.mark.cuda_wheel

NUM_LAYERS, WIDTH, NUM_STEPS = 6, 64, 4


def note_weights(seen: dict[str, Tensor], name: str, layer: nn.Module, *_: object) -> None:
    """Copy what `layer` computes with to the host, the first time. A forward hook."""
    for own, param in layer.named_parameters():
        assert param.is_cuda
        seen.setdefault(f"{name}.{own}", param.detach().cpu())


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_fake_cuda
def test_a_placement_starts_trains_and_ends(device: FakeCuda, placement: str, clipping: float, swap_path: str) -> None:
    """Nothing is computed, but what is copied is real: the first forward sees the model's own weights on the device."""
    tower, seen = Tower(NUM_LAYERS, WIDTH), {}
    first = {name: value.clone() for name, value in tower.state_dict().items()}
    for number, layer in enumerate(tower.layers):
        layer.register_forward_hook(partial(note_weights, seen, f"layers.{number}"))
    with build(tower, placement, swap_path, clipping) as engine:
        assert is_same(weights(engine), first)
        for _ in range(NUM_STEPS):
            step(engine)
        assert is_same(seen, first)
        assert engine.global_steps == NUM_STEPS
    del engine, tower, layer
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    counts = device.counts()
    assert torch.cuda.memory_allocated() == 0, f"{torch.cuda.memory_allocated()} bytes are left on the device"
    assert counts["registrations"] == counts["unregistrations"] and counts["registered_nbytes"] == 0, counts
    assert counts["misuses"] == 0, "stderr names them"


@on_fake_cuda
def test_a_checkpoint_is_read_back(device: FakeCuda, swap_path: str) -> None:
    with build(Tower(NUM_LAYERS, WIDTH), "cpu/nvme", swap_path) as engine:
        step(engine)
        engine.save_checkpoint(swap_path + "/tags", tag="first")
        saved = weights(engine)
        step(engine)
    with build(Tower(NUM_LAYERS, WIDTH), "none/none", swap_path) as engine:
        engine.load_checkpoint(swap_path + "/tags", tag="first")
        assert is_same(weights(engine), saved)
        step(engine)
    assert device.counts()["misuses"] == 0, "stderr names them"
