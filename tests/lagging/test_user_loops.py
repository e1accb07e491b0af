"""Loops of a user's own, with optimizers without an engine, have the bits of torch's optimizers on the CPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.optim.test_offloaded import RULES, models
from tiered_zero.optim import OffloadedOptimizer

NUM_STEPS = 4


def train(net: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """A loop of the user's: it accumulates twice, clips, steps, and changes a weight by hand."""
    place = next(net.parameters()).device
    for step in range(NUM_STEPS):
        for micro in range(2):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2 * step + micro)).to(place, dtype)
            net(x, step % 2 == 0).float().backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        optimizer.step(**options)
        optimizer.zero_grad()
        with torch.no_grad():
            net.first.weight.mul_(1.25)
    return [param.detach().cpu() for param in net.parameters()]


class MasterCopies(torch.optim.Optimizer):
    """The rule on fp32 copies of parameters of 16 bits, which are rounded from those."""

    def __init__(self, params: list[nn.Parameter], rule: type[torch.optim.Optimizer], **defaults: Any) -> None:
        super().__init__(params, {})
        self._params = params
        self._masters = [nn.Parameter(param.detach().float()) for param in params]
        self._inner = rule(self._masters, **defaults)
        self._last = [param.detach().clone() for param in params]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param, master, last in zip(self._params, self._masters, self._last, strict=True):
            master.copy_(torch.where(param == last, master, param.float()))  # what changed by hand
            master.grad = None if param.grad is None else param.grad.float()
        self._inner.step()
        for param, master, last in zip(self._params, self._masters, self._last, strict=True):
            last.copy_(param.copy_(master))


@pytest.mark.parametrize("where", ["cpu", "nvme"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
@on_device
def test_offloaded_state(device: LaggingDevice, name: str, where: str, swap_path: Path):
    """Stepped whole, parameter by parameter, and on a stream of the user's."""
    rule, defaults = RULES[name]
    plain = models()[0]
    expected = train(plain, rule(plain.parameters(), **defaults), torch.float32)
    offload = {"device": where, "nvme_path": str(swap_path)} if where == "nvme" else {"device": where}
    for seed, (options, in_stream, settings) in enumerate(
        (
            ({}, False, {"h2d_bytes_per_s": 8e6}),
            ({"on_written": lambda param: None}, False, {"kernel_s": 2e-4}),
            ({}, True, {"kernel_s": 2e-4}),
        )
    ):
        device.reset()
        device.set(delay_seed=seed, **settings)
        with torch.Stream("cuda") if in_stream else contextlib.nullcontext():
            net = models()[0].cuda()
            with OffloadedOptimizer(net.parameters(), rule, offload, **defaults) as optimizer:
                found = train(net, optimizer, torch.float32, **options)
        different = [number for number, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
        assert not different, (options, in_stream, settings, different)
    assert device.pinned_nbytes() == 0


@pytest.mark.parametrize("where", ["cpu", "nvme"])
@on_device
def test_masters_of_16_bits(device: LaggingDevice, where: str, swap_path: Path):
    rule, defaults = RULES["sgd"]
    plain = models()[0].bfloat16()
    expected = train(plain, MasterCopies(list(plain.parameters()), rule, **defaults), torch.bfloat16)
    offload = {"device": where, "nvme_path": str(swap_path)} if where == "nvme" else {"device": where}
    for seed in range(2):
        device.set(delay_seed=seed, h2d_bytes_per_s=8e6)
        net = models()[0].to("cuda", torch.bfloat16)
        with OffloadedOptimizer(net.parameters(), rule, offload, **defaults) as optimizer:
            found = train(net, optimizer, torch.bfloat16)
        different = [number for number, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
        assert not different, (seed, different)
