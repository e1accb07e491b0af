"""Models that torchao and bitsandbytes have quantized: trained, or refused with a remedy that holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.trainers import tiered

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other


@pytest.mark.parametrize("kind", ["Int8", "Float8"])
def test_weights_of_torchao_are_refused_by_their_class(kind: str, swap_path) -> None:
    from torchao import quantization

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantization.quantize_(model[:1], getattr(quantization, f"{kind}WeightOnlyConfig")())
    model[0].requires_grad_(False)
    with pytest.raises(tiered_zero.errors.ModelError, match=rf"Parameter 0\.weight: .* found {kind}Tensor of torchao"):
        tiered(model, swap_path / "new")
    assert not any(swap_path.iterdir())


class Adapted(nn.Module):
    """Blocks of a quantized layer with a trainable one beside it."""

    def __init__(self, kind: str, **options: Any) -> None:
        import bitsandbytes

        super().__init__()
        torch.manual_seed(0)
        quantized = (getattr(bitsandbytes.nn, kind)(64, 64, bias=False, **options) for _ in range(6))
        self.blocks = nn.ModuleList(nn.ModuleList([base.to("cpu"), nn.Linear(64, 64)]) for base in quantized)
        self.use_reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, adapter in self.blocks:  # type: ignore[misc]

            def run(x: torch.Tensor, base: nn.Module = base, adapter: nn.Module = adapter) -> torch.Tensor:
                return x + base(x) + adapter(x)

            if self.use_reentrant is None:
                x = run(x)
            else:
                x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=self.use_reentrant)  # type: ignore[assignment]
        return x.square().mean()


def step(engine: tiered_zero.Engine) -> None:
    engine.backward(engine(torch.ones(4, 64, requires_grad=True)))
    engine.step()


def test_linear_8bit_is_named(swap_path) -> None:
    refused = pytest.raises(tiered_zero.errors.ModelError, match=r"its module, Linear8bitLt, .* take Linear4bit")
    with tiered(Adapted("Linear8bitLt", has_fp16_weights=False), swap_path) as engine, refused:
        step(engine)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_linear_4bit_trains_in_a_small_window(use_reentrant: bool | None, swap_path) -> None:
    with tiered(Adapted("Linear4bit"), swap_path, runtime={"device_memory_limit": "56KiB"}) as engine:
        engine.module.use_reentrant = use_reentrant
        step(engine)


def test_linear_4bit_evaluates_where_it_stays_in_training_mode(swap_path) -> None:
    with tiered(Adapted("Linear4bit"), swap_path) as engine:
        step(engine)
        engine.eval()
        for base, _ in engine.module.blocks:
            base.train()
        with torch.no_grad():
            assert torch.equal(engine(torch.ones(4, 64)), engine(torch.ones(4, 64)))
