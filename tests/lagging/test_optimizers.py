"""An OffloadedOptimizer over parameters on a device that lags behind its host gives the bits of the plain one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tiered_zero.concurrency.transfer import COMPLETED
from tiered_zero.hardware.runtime import build_accelerator
from tiered_zero.layout.subgroups import pack_params
from tiered_zero.optim import OffloadedOptimizer, offloaded
from tiered_zero.optim.user_params import UserParameters


class Layers(nn.Module):
    """Linear layers, maybe on several devices."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, dtype=dtype) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.device, layer.weight.dtype)).tanh()
        return x.float().square().mean()


def place(net: Layers, devices: list[str]) -> Layers:
    """One weight becomes every other column of a larger tensor."""
    for index, layer in enumerate(net.layers):
        layer.to(devices[index % len(devices)])
    weight = net.layers[1].weight
    weight.data = weight.data.new_zeros(48, 96)[:, ::2].copy_(weight.data)
    return net


def train(net: Layers, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        net(torch.randn(8, 48, generator=generator)).backward()
        if step % 2 and isinstance(optimizer, OffloadedOptimizer):
            written: list[torch.Tensor] = []
            optimizer.step(on_written=lambda param, seen=written: seen.append(param.detach().clone()))
            assert all(map(torch.equal, written, net.parameters()))
        else:
            optimizer.step()
        optimizer.zero_grad()


def compare(device: LaggingDevice, offload: dict[str, str], devices: list[str]) -> None:
    own = Layers(torch.float32)
    plain = place(copy.deepcopy(own), ["cpu"])
    place(own, devices)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 5)
    device.set(delay_seed=1, kernel_s=2e-4, h2d_bytes_per_s=2e6, d2h_bytes_per_s=2e7)
    with OffloadedOptimizer(own.parameters(), torch.optim.AdamW, offload, lr=1e-2) as optimizer:
        train(own, optimizer, 5)
    for left, right in zip(plain.parameters(), own.parameters(), strict=True):
        assert torch.equal(left, right.cpu())


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("devices", [["cuda"], ["cuda:0", "cuda:1", "cuda:0", "cuda:0"], ["cpu", "cuda"]], ids="-".join)
@on_device
def test_steps_are_those_of_the_plain_optimizer(
    device: LaggingDevice, tier: str, devices: list[str], swap_path: Path
) -> None:
    offloaded.AUTO_SUB_GROUP_NUMEL = 1000  # every weight is cut
    compare(
        device,
        {"device": tier, "buffer_count": 2, **({"nvme_path": str(swap_path)} if tier == "nvme" else {})},
        devices,
    )


@on_device
def test_a_write_to_a_second_device_is_complete_once_it_says_so(device: LaggingDevice) -> None:
    """Lanes have streams of the first device alone; the staging buffer is used again at once."""
    params = [nn.Parameter(torch.zeros(2048, device=name)) for name in ("cuda:0", "cuda:1")]
    for param in params:
        torch.cuda.synchronize(param.device)  # lanes are not ordered after the streams on which zeros were written
    accelerator = build_accelerator("cuda:0")
    user = UserParameters([{"params": params}])
    user.connect(accelerator)
    memory = torch.ones(8192, dtype=torch.uint8, pin_memory=True)
    device.set(h2d_bytes_per_s=2e6)
    for subgroup in pack_params(user.specs, 1 << 20, elementwise=True):
        for segment in subgroup.segments:
            written, _ = user.write(segment, "param", memory, COMPLETED, None)
            written.wait()
            memory.zero_()
            assert params[segment.unit.index].any(), segment.unit.name
            memory.fill_(1)
    accelerator.close()
