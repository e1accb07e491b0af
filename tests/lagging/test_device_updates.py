"""State that rests on the device: torch's own bits there, in few launches, and no wait for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.support.trainers import tiered
from tiered_zero.engine.engine import Engine

FLAGS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": False}, "fused": {"fused": True}}


class Net(nn.Module):
    """Units of a weight and a bias."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float().square().mean()


def two_groups(**flags: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Decay of weights alone, as is usual: no two neighbours have one param group."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3, **flags)

    return make


def build(net: Net, swap_path: Path, flags: dict[str, Any], params: str = "none", **more: Any) -> Engine:
    """With all state in one sub-group."""
    runtime = {"device": "cuda", **more.pop("runtime", {})}
    zero = {"sub_group_size": 1 << 20}
    return tiered(net, swap_path, (params, "none"), two_groups(**flags), zero=zero, runtime=runtime, **more)


def count_step(device: LaggingDevice, engine: Engine) -> dict[str, int]:
    """What the third step() launches and waits for."""
    for _ in range(3):
        engine.backward(engine(torch.ones(4, 48, device="cuda")))
        torch.accelerator.synchronize()
        device.take_counts()
        engine.step()
    return device.take_counts()


@pytest.mark.parametrize("flags", FLAGS)
@on_device
def test_the_bits_are_those_of_torchs_optimizer_on_the_device(
    device: LaggingDevice, swap_path: Path, flags: str
) -> None:
    """By the code that its flags choose."""
    own, inputs = Net(3), torch.randn(4, 8, 48, generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(own).cuda()
    optimizer = two_groups(**FLAGS[flags])(plain)
    device.set(delay_seed=1)
    with build(own, swap_path, FLAGS[flags]) as engine:
        for x in inputs.cuda():
            engine.backward(engine(x))
            engine.step()
            plain(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, found in plain.state_dict().items():
            assert torch.equal(engine.module.state_dict()[name].cpu(), found.cpu()), name


@pytest.mark.parametrize("flags", ["default", "fused"])
@on_device
def test_launches_do_not_grow_with_the_parameters(device: LaggingDevice, swap_path: Path, flags: str) -> None:
    found = []
    for num_layers in (2, 8):
        with build(Net(num_layers), swap_path / str(num_layers), FLAGS[flags], bf16={"enabled": True}) as engine:
            found.append(count_step(device, engine).get("kernel", 0))
    assert found[0] == found[1] < 32


@on_device
def test_a_sub_group_is_waited_for_once_on_its_way_to_host_memory(device: LaggingDevice, swap_path: Path) -> None:
    with build(Net(6), swap_path, {}, params="cpu", bf16={"enabled": True}) as engine:
        counts = count_step(device, engine)
    assert counts["copy.d2h.async"] == 6, "a segment of each unit"
    waits = counts["host_wait.event"] + counts.get("host_wait.stream", 0)
    assert waits < 6, "and not for each"


@on_device
def test_the_table_of_8_bit_moments_is_copied_once(device: LaggingDevice, swap_path: Path) -> None:
    runtime = {"state_format": "lossy_8bit_moments"}
    with build(Net(2), swap_path, {}, bf16={"enabled": True}, runtime=runtime) as engine:
        assert not any(name.startswith("copy.h2d") for name in count_step(device, engine))
