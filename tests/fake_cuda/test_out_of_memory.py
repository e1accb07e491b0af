"""Where the device is out of memory the error is raised, and the engine goes on, or latches where it cannot."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tiered_zero
from tests.fake_cuda.child import FakeCuda, on_fake_cuda
from tests.fake_cuda.training import Tower, batch, build, is_same, step, weights
from tiered_zero.errors import EngineFailedError, PlanError
from tiered_zero.sizes import GIB, MIB

pytestmark = pytest.mark.cuda_wheel

NUM_LAYERS, WIDTH = 6, 1792
"""Of 12.25 MiB a unit: a segment of torch's allocator for each."""

CAPACITY = 16 * GIB


def use_up(device: FakeCuda) -> None:
    """Leave CUDA nothing to give."""
    device.set_capacity(device.counts()["used_nbytes"])


def fill(device: FakeCuda) -> list[torch.Tensor]:
    """Return tensors that take all that torch's allocator still has, in the sizes of its bins."""
    use_up(device)
    tensors = []
    for nbytes in (16 * MIB, MIB, MIB // 16, 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                tensors.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    return tensors


def fails(engine: tiered_zero.Engine) -> bool:
    """Return whether a step raises torch's OutOfMemoryError."""
    try:
        step(engine)
    except torch.OutOfMemoryError:
        return True
    return False


@on_fake_cuda
def test_out_of_memory_in_the_model_drops_the_step(device: FakeCuda, swap_path: str) -> None:
    tower = Tower(NUM_LAYERS, WIDTH)
    with build(tower, "cpu/cpu", swap_path) as engine:
        step(engine)
        before = weights(engine)
        hook = tower.layers[3].register_forward_hook(lambda *_: torch.empty(2 * CAPACITY, device="cuda") and None)
        assert fails(engine)
        hook.remove()
        assert is_same(weights(engine), before) and engine.global_steps == 1
        step(engine)
        assert engine.global_steps == 2


@on_fake_cuda
def test_a_fetch_takes_what_the_allocator_has_cached(device: FakeCuda, swap_path: str) -> None:
    with build(Tower(NUM_LAYERS, WIDTH), "cpu/cpu", swap_path) as engine:
        torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")  # freed at once, and kept by the common pool
        use_up(device)
        for _ in range(3):
            step(engine)
        assert device.counts()["refused_mallocs"] > 0
        assert engine.global_steps == 3


@on_fake_cuda
def test_a_fetch_that_finds_no_memory_drops_the_step(device: FakeCuda, swap_path: str) -> None:
    with build(Tower(NUM_LAYERS, WIDTH), "cpu/cpu", swap_path) as engine:
        before = weights(engine)
        torch.cuda.empty_cache()
        use_up(device)
        assert fails(engine)
        assert is_same(weights(engine), before) and engine.global_steps == 0
        device.set_capacity(CAPACITY)
        step(engine)
        assert engine.global_steps == 1


@on_fake_cuda
def test_a_gradient_check_without_memory_drops_the_step(device: FakeCuda, swap_path: str) -> None:
    with build(Tower(NUM_LAYERS, WIDTH), "none/none", swap_path) as engine:
        step(engine)
        engine.backward(engine(batch(engine)))
        before = weights(engine)
        held = fill(device)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
        held.clear()
        device.set_capacity(CAPACITY)
        assert is_same(weights(engine), before) and engine.global_steps == 1
        step(engine)
        assert engine.global_steps == 2


@pytest.mark.parametrize("placement", ["none/none", "cpu/none"])
@on_fake_cuda
def test_an_update_without_memory_for_its_temporaries_latches(device: FakeCuda, placement: str, swap_path: str) -> None:
    """They are in no plan, and values that are replaced in place cannot be had back."""
    with build(Tower(NUM_LAYERS, WIDTH), placement, swap_path) as engine:
        step(engine)
        held: list[torch.Tensor] = []
        hook = register_optimizer_step_pre_hook(lambda *_: held.extend(fill(device)))
        with pytest.raises(torch.OutOfMemoryError):
            step(engine)
            engine.module.state_dict()  # waits for an update that overlaps
        hook.remove()
        held.clear()
        device.set_capacity(CAPACITY)
        with pytest.raises(EngineFailedError):
            step(engine)


@on_fake_cuda
def test_what_does_not_fit_is_refused_before_the_start(device: FakeCuda, swap_path: str) -> None:
    device.set_capacity(64 * MIB)
    with pytest.raises(PlanError, match="of device memory"):
        build(Tower(NUM_LAYERS, WIDTH), "none/none", swap_path)
    assert device.counts()["misuses"] == 0, "stderr names them"
