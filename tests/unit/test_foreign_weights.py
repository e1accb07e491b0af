"""Weights as libraries for quantized models keep them: refused by their class, or named with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, tiered
from tiered_zero.errors import BudgetError, ModelError


class Scaled(Tensor):
    """Eight bits and a scale in tensors of their own, as a quantized weight."""

    @staticmethod
    def __new__(cls, bits: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, bits.shape, dtype=scale.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, bits: Tensor, scale: Tensor) -> None:
        self.bits, self.scale = bits, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].bits, args[0].scale)
        raise NotImplementedError(f"{func} of a scaled weight")


def test_a_tensor_without_plain_memory_is_refused_before_anything_is_made(swap_path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    bits = torch.ones(8, 8, dtype=torch.int8)
    model[0].weight = nn.Parameter(Scaled(bits, torch.ones(())), requires_grad=False)
    with pytest.raises(ModelError, match=r"Parameter 0\.weight: expected a plain tensor; found Scaled of tests"):
        tiered(model, swap_path / "new")
    assert not any(swap_path.iterdir())


class Dequantized(torch.autograd.Function):
    """Keeps the packed weight on its context, past autograd's hooks for saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.packed = packed.view(-1)
        return x @ (packed.float() / 255)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad @ (ctx.packed.view(64, 64).float() / 255).t(), None


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(0, 255, (64, 64), dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return Dequantized.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class Adapted(nn.Module):
    """Packed layers with a trainable one beside each. `use_reentrant`: of the checkpoint around each pair."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleList([PackedLinear(), nn.Linear(64, 64)]) for _ in range(6))
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, base: nn.Module, adapter: nn.Module) -> Tensor:
            return x + (base(x) + adapter(x)).tanh()

        for base, adapter in self.blocks:  # type: ignore[misc]
            x = checkpoint(run, x, base, adapter, use_reentrant=self._use_reentrant)  # type: ignore[assignment]
        return x.square().mean()


def train(trainer: Any) -> list[Tensor]:
    seen = []
    for number in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).requires_grad_()
        loss = trainer(x)
        trainer.backward(loss)
        trainer.step()
        seen.append(loss.detach())
    return seen


def over_a_small_window(use_reentrant: bool, swap_path: Any) -> tiered_zero.Engine:
    return tiered(Adapted(use_reentrant), swap_path, FAR[1], runtime={"device_memory_limit": "56KiB"})


def test_a_function_that_keeps_weights_is_named_by_its_module_and_trains_as_the_error_says(swap_path) -> None:
    refused = pytest.raises(BudgetError, match=r"Views of weights of PackedLinear keep .* use_reentrant=True")
    with over_a_small_window(False, swap_path) as engine, refused:
        train(engine)
    expected = follow(train, Plain(Adapted(True)))
    assert_same_bits(expected, follow(train, over_a_small_window(True, swap_path)))
