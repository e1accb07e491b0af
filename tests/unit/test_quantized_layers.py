"""Layers of 4 bits of a stand-in for bitsandbytes: weights and scales leave after forward, and come in backward."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.inspection import param_slots
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, same_bits, tiered
from tiered_zero.unit.guard import OffloadedParameter
from tiered_zero.unit.quantized_layers import statistics

SIZE, BLOCK = 64, 16


class State:
    """As bitsandbytes' QuantState: `absmax` of the blocks, whose own are in `state2` where they are quantized."""

    def __init__(self, absmax: Tensor, state2: State | None = None) -> None:
        self.absmax, self.state2, self.nested = absmax, state2, state2 is not None
        self.shape, self.code = (SIZE, SIZE), torch.linspace(-1, 1, 16)


def dequantize(packed: Tensor, state: State) -> Tensor:
    absmax = state.absmax if state.state2 is None else state.absmax * state.state2.absmax
    nibbles = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), 1).long()
    return (state.code[nibbles].view(-1, BLOCK) * absmax[:, None]).view(state.shape)


class Kept(torch.autograd.Function):
    """Keeps the packed weight on its context, past autograd's hooks for saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor, state: State) -> Tensor:
        ctx.kept = packed.view(-1, 1), state
        return torch.addmm(bias, x, dequantize(packed, state).t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad @ dequantize(*ctx.kept), None, None, None


class Linear4bit(nn.Linear):
    def __init__(self, nested: bool = False) -> None:
        super().__init__(SIZE, SIZE)
        self.weight: Any = nn.Parameter(torch.randint(0, 255, (SIZE * SIZE // 2, 1), dtype=torch.uint8), False)
        self.bias.requires_grad_(False)
        scales = torch.rand(SIZE * SIZE // BLOCK) / 8
        self.weight.quant_state = State(scales, State(torch.rand(1)) if nested else None)
        self.compute_dtype: torch.dtype | None = None
        self.compute_type_is_set = False

    def set_compute_type(self, x: Tensor) -> None:
        self.compute_dtype = x.dtype

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.weight.quant_state.absmax.detach()

    def forward(self, x: Tensor) -> Tensor:
        return library.matmul_4bit(x, self.weight, bias=self.bias, quant_state=self.weight.quant_state)


def matmul_4bit(x: Tensor, weight: Tensor, bias: Tensor, quant_state: State) -> Tensor:
    found: Tensor = Kept.apply(x, weight, bias, quant_state)  # type: ignore[no-untyped-call]
    return found


library: Any = SimpleNamespace(
    nn=SimpleNamespace(Linear4bit=Linear4bit),
    functional=SimpleNamespace(dequantize_4bit=dequantize),
    matmul_4bit=matmul_4bit,
)


class Adapted(nn.Module):
    """Layers of 4 bits with a trainable one beside each. `use_reentrant`: of the checkpoint around each pair."""

    def __init__(self, use_reentrant: bool | None, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleList([Linear4bit(nested), nn.Linear(SIZE, SIZE)]) for _ in range(6))
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, base: nn.Module, adapter: nn.Module) -> Tensor:
            return x + (base(x) + adapter(x)).tanh()

        for pair in self.blocks:
            if self._use_reentrant is None:
                x = run(x, *pair)  # type: ignore[misc]
            else:
                x = checkpoint(run, x, *pair, use_reentrant=self._use_reentrant)  # type: ignore[misc,assignment]
        return x.square().mean()


def train(trainer: Any) -> list[Tensor]:
    seen = []
    for number in range(3):
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number)).requires_grad_()
        loss = trainer(x)
        trainer.backward(loss)
        trainer.step()
        seen.append(loss.detach())
    return seen


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_the_bits_of_plain_in_a_small_window(use_reentrant: bool | None, nested: bool, swap_path: Any) -> None:
    """A layer with its adapter takes 20 KiB; six layers are more than the window."""
    expected = follow(train, Plain(Adapted(use_reentrant, nested)))
    for placement in FAR:
        engine = tiered(
            Adapted(use_reentrant, nested), swap_path, placement, runtime={"device_memory_limit": "56KiB"},
            bf16={"enabled": False},
        )  # fmt: skip
        assert_same_bits(expected, follow(train, engine))


def test_scales_are_paged_in_their_own_dtype(swap_path: Any) -> None:
    model = Adapted(None, False)
    (scales,) = statistics(model.blocks[0][0]).values()  # type: ignore[index]
    first, names = scales.detach().clone(), [name for name, _ in model.named_parameters()]
    with tiered(model, swap_path, bf16={"enabled": True}) as engine:
        slots = [entry.param.name for unit in param_slots(engine).values() for entry in unit.entries]
        assert "blocks.0.0.weight.absmax" in slots
        assert isinstance(scales, OffloadedParameter) and scales.dtype == torch.float32
        assert [name for name, _ in engine.module.named_parameters()] == names
        assert same_bits(engine.module.state_dict()["blocks.0.0.weight.absmax"], first)
        assert "forward" in vars(model.blocks[0][0])  # type: ignore[index]
    assert "forward" not in vars(model.blocks[0][0])  # type: ignore[index]
