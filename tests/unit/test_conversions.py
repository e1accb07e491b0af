"""module.to(), .cpu(), .float() and the like, as training frameworks call them: nothing where nothing changes."""

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.trainers import assert_parity, tiered, train

PLACEMENTS = [("nvme", "nvme"), ("cpu", "cpu"), ("none", "cpu")]

SAME = {
    "to(device)": lambda module: module.to("cpu"),
    "to(dtype)": lambda module: module.to(torch.float32),
    "to(both)": lambda module: module.to(device=torch.device("cpu"), dtype=torch.float32),
    "cpu": lambda module: module.cpu(),
    "float": lambda module: module.float(),
    "type": lambda module: module.type(torch.float32),
    "to(memory_format)": lambda module: module.to(memory_format=torch.preserve_format),
}

OTHER = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.bfloat16(),
    "to(meta)": lambda module: module.to("meta"),
    "type": lambda module: module.type(torch.float64),
}


class Mixed(nn.Linear):
    """Computes in fp64, by a conversion of its own."""

    def forward(self, x):
        return nn.functional.linear(x.double(), self.weight.to(torch.float64)).float().square().sum()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 8), Mixed(8, 4))


def batch(number: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(number)),)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_conversions_to_what_the_model_is_do_nothing(placement, swap_path):
    def script(trainer):
        module, seen = trainer.module, []
        for number, convert in enumerate(SAME.values()):
            assert convert(module) is module
            loss = trainer(*batch(number))
            seen.append(loss.detach())
            convert(module)
            trainer.backward(loss)
            trainer.step()
        return seen

    assert_parity(build, script, swap_path, [placement], clipping=0.5)


@pytest.mark.parametrize("name", OTHER)
def test_other_conversions_say_what_to_do(name, swap_path):
    with tiered(build(), swap_path, clipping=0.5) as engine:
        before = engine.module.state_dict()
        with pytest.raises(tiered_zero.errors.ParameterOffloadedError, match=r"cannot move or convert.*config"):
            OTHER[name](engine.module)
        assert all(torch.equal(value, before[key]) for key, value in engine.module.state_dict().items())
        train(engine, batch, 1)


@pytest.mark.parametrize("name", [name for name in OTHER if name != "to(meta)"])  # which replaces parameters
def test_other_conversions_of_what_lives_on_the_device_are_refused_at_the_next_call(name, swap_path):
    with tiered(build(), swap_path, ("none", "cpu"), clipping=0.5) as engine:
        train(engine, batch, 1)
        OTHER[name](engine.module)
        with pytest.raises(tiered_zero.errors.ModelError, match=r"Parameter \S+ was moved or converted.*found"):
            engine(*batch(0))
