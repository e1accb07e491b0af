"""State that rests on the device: torch's own bits there, in few launches, and no wait for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.support.trainers import tiered
from tiered_zero import Engine
from tiered_zero.rules.native_rules import AdamRule
from tiered_zero.rules.quantized import QuantizedAdam
from tiered_zero.rules.rule import Slice, UpdateRule
from tiered_zero.rules.state_layout import split_master

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


def build(
    net: Net, swap_path: Path, flags: dict[str, Any], params: str = "none", state: str = "none", **more: Any
) -> Engine:
    """With all state in one sub-group."""
    runtime = {"device": "cuda", **more.pop("runtime", {})}
    zero = {"sub_group_size": 1 << 20}
    return tiered(net, swap_path, (params, state), two_groups(**flags), zero=zero, runtime=runtime, **more)


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


LAUNCHES = {
    ("fp32", "default"): 25,
    ("fp32", "fused"): 16,
    ("bf16_remainder", "default"): 86,
    ("lossy_bf16_moments", "default"): 135,
    ("lossy_8bit_moments", "default"): 212,
}
"""Most kernels, copies on the device among them, of an update of two param groups in one sub-group."""


@pytest.mark.parametrize(("state_format", "flags"), LAUNCHES)
@on_device
def test_launches_do_not_grow_with_the_parameters(
    device: LaggingDevice, swap_path: Path, state_format: str, flags: str
) -> None:
    found = []
    runtime = {"state_format": state_format}
    for num_layers in (2, 6):
        net, path = Net(num_layers), swap_path / str(num_layers)
        with build(net, path, FLAGS[flags], bf16={"enabled": True}, runtime=runtime) as engine:
            counts = count_step(device, engine)
            found.append(counts["kernel"] + counts.get("copy.d2d", 0))
    assert found[0] == found[1] <= LAUNCHES[state_format, flags]


RULES: dict[str, Callable[[], UpdateRule]] = {
    "bf16_remainder": lambda: AdamRule(decoupled=True, kernel=None),
    "lossy_bf16_moments": lambda: AdamRule(decoupled=True, kernel=None, state_dtype=torch.bfloat16),
    "lossy_8bit_moments": lambda: QuantizedAdam(AdamRule(decoupled=True, kernel=None)),
}


def runs_of(rule: UpdateRule, state_format: str, hyper: dict[str, Any], where: str) -> list[Slice]:
    """Of lengths that end inside of blocks, and inside of what is stepped at once."""
    runs = []
    for numel in (5, 64, 1, 333, 32, 200):
        torch.manual_seed(numel)
        master, state = torch.randn(numel), {}
        for field in rule.state_fields((numel,), hyper):
            state[field.name] = torch.zeros(field.shape, dtype=field.dtype, device=where)
        out = master.bfloat16()
        if state_format == "bf16_remainder":
            out, master, mark = split_master(master)
            state["exp_avg_sq"].copy_(torch.where(mark, -0.0, 0.0))
        grad = torch.empty(numel, device=where)
        runs.append(Slice(master=master.to(where), grad=grad, state=state, scalars={}, hyper=hyper, out=out.to(where)))
    return runs


def step_runs(rule: UpdateRule, runs: Sequence[Slice], together: bool) -> list[torch.Tensor]:
    """Take three steps; return all that the runs hold."""
    for step in range(3):
        for run in runs:
            generator = torch.Generator().manual_seed(1000 * step + run.master.numel())
            run.grad.copy_(torch.randn(run.master.numel(), generator=generator))
        for some in [runs] if together else [[run] for run in runs]:
            rule.update(some)
    assert all(run.scalars == {"step": 3.0} for run in runs)
    return [x.cpu() for run in runs for x in (run.master, run.out, *run.state.values()) if x is not None]


@pytest.mark.parametrize("state_format", RULES)
@on_device
def test_runs_that_are_stepped_together_have_the_bits_of_each_alone(device: LaggingDevice, state_format: str) -> None:
    """On the device, and on the CPU without the native kernel."""
    hyper = {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}
    rule = RULES[state_format]()
    expected = step_runs(rule, runs_of(rule, state_format, hyper, "cpu"), together=False)
    for most_numel in (96, 1 << 22):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tiered_zero.rules.rule._DEVICE_CHUNK_NUMEL", most_numel)
            for together in (True, False):
                found = step_runs(rule, runs_of(rule, state_format, hyper, "cuda"), together)
                assert all(map(torch.equal, expected, found)), (most_numel, together)


@on_device
def test_a_sub_group_is_waited_for_once_on_its_way_to_host_memory(device: LaggingDevice, swap_path: Path) -> None:
    with build(Net(6), swap_path, {}, params="cpu", bf16={"enabled": True}) as engine:
        counts = count_step(device, engine)
    assert counts["copy.d2h.async"] == 6, "a segment of each unit"
    waits = counts.get("host_wait.event", 0) + counts.get("host_wait.stream", 0)
    assert waits < 6, "and not for each"


@on_device
def test_a_sub_group_is_waited_for_once_on_its_way_to_the_device(device: LaggingDevice, swap_path: Path) -> None:
    """And its gradients on theirs from there, however late each copy is."""
    device.set(h2d_bytes_per_s=4e6, d2h_bytes_per_s=4e6)
    with build(Net(6), swap_path, {}, state="cpu", bf16={"enabled": True}, runtime={"update": "barrier"}) as engine:
        counts = count_step(device, engine)
    assert counts["copy.h2d.async"] == 6, "a segment of each unit"
    assert counts.get("host_wait.event", 0) + counts.get("host_wait.stream", 0) <= 3


@on_device
def test_the_table_of_8_bit_moments_is_copied_once(device: LaggingDevice, swap_path: Path) -> None:
    runtime = {"state_format": "lossy_8bit_moments"}
    with build(Net(2), swap_path, {}, bf16={"enabled": True}, runtime=runtime) as engine:
        assert not any(name.startswith("copy.h2d") for name in count_step(device, engine))
