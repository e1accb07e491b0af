"""torch's attention takes fused kernels and nested tensors in evaluation, where nothing hooks or guards its weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.pairwise import by_turns
from tests.support.trainers import FAR, Plain, adamw, assert_same_bits, follow, tiered

WIDTH = 16


class Encoder(nn.Module):
    def __init__(self, nests: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nests)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        hidden = self.encoder(x, src_key_padding_mask=padding)
        found: Tensor = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return found


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(**options)


def look(trainer: Any) -> list[Tensor]:
    """Train and evaluate in turns: outputs, with and without padding."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, WIDTH, generator=generator)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = padding[2, 2:] = True
    seen: list[Tensor] = []
    for _ in range(2):
        trainer.module.train()
        torch.manual_seed(2)  # of dropout
        trainer.backward(trainer(x).square().mean())
        trainer.step()
        trainer.module.eval()
        with torch.no_grad():
            seen += [trainer.module.encoder(x, src_key_padding_mask=padding), trainer(x), trainer(x, padding)]
        with torch.inference_mode():
            seen.append(trainer(x, padding).clone())
    return seen


@pytest.fixture
def without_fused_kernels() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


OPTIONS: list[dict[str, Any]] = [{}, {"norm_first": True, "nests": False}, {"bias": False, "nests": False}]


@pytest.mark.usefixtures("without_fused_kernels")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("cap", "placement"), by_turns([1, 2000, 10**6], [("cpu", "cpu"), ("none", "none")]))
def test_without_fused_kernels_evaluation_has_plain_pytorchs_bits(
    placement: tuple[str, str], cap: int, options: dict[str, Any], swap_path: Path
) -> None:
    expected = follow(look, Plain(build(**options), adamw))
    engine = tiered(build(**options), swap_path, placement, adamw, runtime={"unit_size_cap": cap})
    assert_same_bits(expected, follow(look, engine))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("cap", "placement"), by_turns([1, 2000, 10**6], [*FAR, ("none", "none")]))
def test_evaluation_with_fused_kernels_differs_at_the_padding_alone(
    placement: tuple[str, str], cap: int, swap_path: Path
) -> None:
    """Plain PyTorch has zeros there. The kernel of a whole layer is not taken where it has hooks: other last bits."""
    expected = follow(look, Plain(build(), adamw))
    found = follow(look, tiered(build(), swap_path, placement, adamw, runtime={"unit_size_cap": cap}))
    for left, right in zip(expected.seen, found.seen, strict=True):
        torch.testing.assert_close(left[0], right[0], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, found.weights[name]) for name, value in expected.weights.items())
