"""Weights used in ways that a hook on a module's forward does not see, and weights that are frozen or left out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.inspection import Traffic, everything, param_slots
from tests.support.models import HIDDEN, VOCAB, Block, ParityGPT, batch, groups
from tests.support.trainers import FAR, assert_parity, tiered, train


def final_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)


class Sliced(nn.Module):
    """Returns slices of its weight: views that outlive its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, HIDDEN))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight[2:6], self.weight.view(-1)[::2]


class SliceUser(Base):
    def __init__(self) -> None:
        super().__init__()
        self.sliced = Sliced()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rows, flat = self.sliced()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        x = x * rows.mean(0) + flat[:HIDDEN]
        return final_loss(x, self.tokens.weight, targets)


class LateUser(Base):
    """Takes weights before, and uses them after, their module's forward; two modules' weights in one call."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        early = self.first.weight
        x = self.second(self.first(self.tokens(tokens)))
        for block in self.blocks:
            x = block(x)
        x = F.linear(F.linear(x, early, self.second.bias), self.second.weight.t())
        x = torch.cat([x, (self.first.bias + self.second.bias).expand_as(x)], dim=-1)
        return final_loss(x[..., :HIDDEN] + x[..., HIDDEN:], self.tokens.weight, targets)


class SavedLinear(torch.autograd.Function):
    """Saves its weight for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.einsum("bti,btj->ij", grad, x)


class KeptLinear(torch.autograd.Function):
    """Keeps the parameter itself, as some libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, torch.einsum("bti,btj->ij", grad, ctx.x)


class CustomUser(Base):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = SavedLinear.apply(self.tokens(tokens), self.first.weight)
        for block in self.blocks:
            x = block(x)
        x = KeptLinear.apply(x, self.second.weight)
        return final_loss(x, self.tokens.weight, targets)


class Grown(Base):
    """Higher-order use: a gradient inside of forward, whose own graph is kept."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        energy = self.first(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return final_loss(self.blocks[0](x + 0.1 * slope), self.tokens.weight, targets)


@pytest.mark.parametrize("kind", [SliceUser, LateUser, CustomUser, Grown])
def test_every_way_to_use_a_weight(kind, swap_path):
    assert_parity(kind, lambda own: train(own, batch), swap_path)


def test_tied_weights_count_once(swap_path):
    with tiered(ParityGPT(), swap_path) as engine:
        slots = param_slots(engine)
        entries = [entry.param.name for unit in slots.values() for entry in unit.entries]
        assert entries.count("tokens.weight") == 1 and "head.weight" not in entries
        weights = engine.module.state_dict()
        assert weights["tokens.weight"].data_ptr() == weights["head.weight"].data_ptr()
        assert engine.module.head.weight is engine.module.tokens.weight


class Adapted(nn.Linear):
    """A frozen linear layer with a trainable low-rank branch."""

    def __init__(self, num_in: int, num_out: int, rank: int = 4) -> None:
        super().__init__(num_in, num_out)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, num_in) * 0.1)
        self.up = nn.Parameter(torch.zeros(num_out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


class Lora(nn.Module):
    """Everything frozen but the adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.requires_grad_(False)
        for block in self.blocks:
            block.mlp[1] = Adapted(HIDDEN, 3 * HIDDEN)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return final_loss(x, self.tokens.weight, targets)


@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_frozen_parameters_have_no_state_and_are_never_written(placement, swap_path, monkeypatch):
    """Their homes are written once, at birth; planned state and gradients are of the adapters and biases alone."""
    assert_parity(Lora, lambda own: train(own, batch), swap_path, [placement])
    with tiered(Lora(), swap_path, placement) as engine:
        frozen = {slot: unit for slot, unit in param_slots(engine).items() if not unit.trainable}
        trainable = {slot: unit for slot, unit in param_slots(engine).items() if unit.trainable}
        before = {slot: unit for slot, unit in frozen.items()}
        assert sum(len(unit.entries) for unit in frozen.values()) == len(
            [p for p in Lora().parameters() if not p.requires_grad]
        )
        traffic = Traffic(monkeypatch)
        train(engine, batch)
        everything(engine)
        assert before.keys().isdisjoint(traffic.written)
        if placement[0] == "nvme":
            assert trainable.keys() <= traffic.written.keys()
        tiers = ("device", "host", "nvme")
        assert sum(engine.plan.nbytes(tier, "gradient") for tier in tiers) == sum(
            unit.numel * 4 for unit in trainable.values()
        )
        state = sum(engine.plan.nbytes(tier, "state") for tier in tiers)
        assert state == sum(unit.numel * 12 for unit in trainable.values())  # master and two moments of Adam


class Alternating(Base):
    """`first` on even steps, `second` on odd ones, and a parameter that is never used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(9))

    def forward(self, tokens: Tensor, targets: Tensor, odd: bool) -> Tensor:
        x = self.tokens(tokens)
        x = self.second(x) if odd else self.first(x)
        return final_loss(self.blocks[0](x), self.tokens.weight, targets)


def test_parameters_without_a_gradient_are_not_stepped(swap_path):
    """Weight decay and step counts stand still with them: Adam's bias correction is each parameter's own."""

    def course(trainer):
        return train(trainer, lambda number: (*batch(number), number % 3 > 0))

    for name, make in {
        "adam": lambda model: torch.optim.AdamW(groups(model), lr=3e-3),
        "momentum": lambda model: torch.optim.SGD(groups(model), lr=0.05, momentum=0.9),
    }.items():
        assert_parity(Alternating, course, swap_path, make_optimizer=make, zero={"sub_group_size": 10**6})
        assert_parity(Alternating, course, swap_path, make_optimizer=make, accumulation=2), name


def test_step_counts_are_each_parameters_own(swap_path):
    with tiered(Alternating(), swap_path) as engine:
        train(engine, lambda number: (*batch(number), number % 3 > 0), steps=8)
        found = everything(engine)
        counts = {value["step"] for name, value in found.items() if name.startswith("scalars")}
        assert counts == {8.0, 3.0, 5.0}


class NumpyUser(Base):
    """Looks at its weights through NumPy in the middle of forward, as a logger does."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.first(self.tokens(tokens))
        scale = float(self.first.weight.detach().numpy().std())
        return final_loss(self.blocks[0](x) * scale, self.tokens.weight, targets)


def test_numpy_inside_of_forward(swap_path):
    assert_parity(NumpyUser, lambda own: train(own, batch), swap_path)
