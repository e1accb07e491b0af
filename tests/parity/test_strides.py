"""Parameters that are not row-major in memory: channels_last, transposed. Kernels, sums and gradients follow memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, assert_parity, tiered, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 32, 1)
        self.mixed = nn.Parameter(torch.randn(40, 32).t() * 0.1)
        self.out = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x)))).mean((2, 3))
        return self.out(x @ self.mixed).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    convolutions = nn.ModuleList([net.first, net.second]).to(memory_format=torch.channels_last)
    assert not convolutions[0].weight.is_contiguous() and not net.mixed.is_contiguous()
    return net


def data(number: int) -> tuple[Tensor]:
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(number))
    return (x.to(memory_format=torch.channels_last),)


RULES = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "AdamW of torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, amsgrad=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize(("rule", "placement"), by_turns(list(RULES), [*FAR, ("none", "cpu")]))
def test_strides_are_kept(placement, rule, swap_path):
    """Norms are sums in the order of memory: the clip factor shows the order."""
    assert_parity(build, lambda own: train(own, data, 3), swap_path, [placement], RULES[rule], clipping=0.01)
    assert_parity(build, lambda own: train(own, data, 2), swap_path, [placement], RULES[rule], accumulation=2)


def strides(values: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: value.stride() for name, value in values.items()}


def test_what_leaves_the_engine_has_them_too(swap_path):
    """state_dict() of the model and of the optimizer, and a load of both."""
    model = build()
    before, shapes = strides(dict(model.named_parameters())), model.state_dict()
    shapes = {name: value.clone() for name, value in shapes.items()}
    with tiered(model, swap_path, make_optimizer=RULES["AdamW"]) as engine:
        train(engine, data, 2)
        assert strides(engine.module.state_dict()) == strides(shapes) == before
        state = engine.optimizer.state_dict()
        weights = engine.module.state_dict()
        rest = train(engine, data, 2)
    plain = build()
    optimizer = RULES["AdamW"](plain)
    for number in range(2):
        plain(*data(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for index, values in optimizer.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["state"][index][name], values[name])
            assert state["state"][index][name].stride() == values[name].stride()
    with tiered(build(), swap_path, make_optimizer=RULES["AdamW"]) as engine:
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(state)
        again = train(engine, data, 2)
    assert [float(x) for x in again] == [float(x) for x in rest]


def test_gradients_are_shown_in_the_parameters_strides(swap_path):
    def script(trainer):
        loss = trainer(*data(0))
        trainer.backward(loss)
        return [param.grad.clone() for param in trainer.module.parameters()]

    with tiered(build(), swap_path, ("none", "cpu"), RULES["momentum"], clipping=1.0) as engine:
        found = script(engine)
        engine.step()
    plain = build()
    plain(*data(0)).backward()
    for value, param in zip(found, plain.parameters(), strict=True):
        assert torch.equal(value, param.grad) and value.stride() == param.grad.stride()
