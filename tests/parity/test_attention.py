"""torch's attention takes fused kernels and nested tensors in evaluation: what it takes does not depend on the tier."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("cap", [1, 2000, 10**6])
@pytest.mark.parametrize("placement", [*FAR, ("none", "none")])
def test_evaluation_of_padded_batches_has_plain_pytorchs_bits(
    placement: tuple[str, str], cap: int, swap_path: Path
) -> None:
    expected = follow(look, Plain(build(), adamw))
    assert not expected.seen[0][1, 3:].any(), "plain PyTorch takes nested tensors"
    found = follow(look, engine := tiered(build(), swap_path, placement, adamw, runtime={"unit_size_cap": cap}))
    assert_same_bits(expected, found)
    assert "KeyedParameter" not in {type(param).__name__ for param in engine.module.parameters()}


FUSED: list[dict[str, Any]] = [{"nests": False}, {"nests": False, "norm_first": True}, {"nests": False, "bias": False}]


@pytest.mark.parametrize("options", FUSED, ids=str)
@pytest.mark.parametrize("placement", [("nvme", "nvme"), ("none", "none")], ids="-".join)
def test_evaluation_without_nested_tensors_takes_the_fused_layer(
    placement: tuple[str, str], options: dict[str, Any], swap_path: Path
) -> None:
    expected = follow(look, Plain(build(**options), adamw))
    engine = tiered(build(**options), swap_path, placement, adamw, runtime={"unit_size_cap": 2000})
    assert_same_bits(expected, follow(look, engine))
    for module in engine.module.modules():
        assert type(module._forward_hooks) is type(nn.Identity()._forward_hooks) and not module._forward_hooks


def test_a_hook_of_the_programs_own_turns_the_fused_layer_off_as_in_plain_pytorch(swap_path: Path) -> None:
    def with_hook(trainer: Any) -> list[Tensor]:
        handle = trainer.module.encoder.layers[0].linear1.register_forward_hook(lambda *_: None)
        seen = look(trainer)
        handle.remove()
        return seen + look(trainer)

    expected = follow(with_hook, Plain(build(nests=False), adamw))
    assert_same_bits(expected, follow(with_hook, tiered(build(nests=False), swap_path, ("nvme", "nvme"), adamw)))
