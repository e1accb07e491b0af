"""What the plan says of activations against what transformers' own classes save, and against their peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.inspection.insides import estimate_of
from tests.support.peaks import PeakBytes
from tiered_zero.config.load import load
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.activations import ActivationEstimate
from tiered_zero.plan.gpt_shape import GPTConfig

SAMPLES = 2
SHAPES = [
    {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2},
    {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 6},
]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "Mixtral": ("MixtralForCausalLM", EXPERTS),
    "GPT2": ("GPT2LMHeadModel", NO_DROPOUT),
}


def build(name: str, shape: dict[str, int], attention: str, layers: int, **more: Any) -> nn.Module:
    class_name, options = CLASSES[name]
    config = getattr(transformers, f"{name}Config")(
        **{"num_hidden_layers": layers, "vocab_size": 64, "pad_token_id": None, **shape, **options, **more},
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = attention
    model: nn.Module = getattr(transformers, class_name)(config).train()
    return model


def estimate(model: nn.Module, dtype: torch.dtype, length: int) -> ActivationEstimate:
    config = load(
        {"train_micro_batch_size_per_gpu": SAMPLES, "bf16": {"enabled": dtype is torch.bfloat16}}, to_train=False
    )
    found = estimate_of(model, config, length)
    assert found is not None
    return found


def saved_nbytes(model: nn.Module, length: int, vocab: int = 64) -> int:
    """Bytes of the distinct storages that autograd saves in a forward, without parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randint(vocab, (SAMPLES, length)))
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=["grouped", "whole"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_block_saves_what_is_estimated(name: str, shape: dict[str, int], dtype: torch.dtype, attention: str) -> None:
    length = 96
    shape = dict(shape)
    if name == "GPT2":
        shape = {"n_embd": shape["hidden_size"], "n_head": shape["num_attention_heads"], "n_positions": length}
    one, two = (build(name, shape, attention, layers).to(dtype) for layers in (1, 2))
    measured = saved_nbytes(two, length) - saved_nbytes(one, length)
    assert estimate(two, dtype, length).block_nbytes == pytest.approx(measured, rel=0.1)


def test_dropout_of_eager_attention_is_estimated() -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_positions": 96, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    one, two = (build("GPT2", sizes, "eager", layers) for layers in (1, 2))
    measured = saved_nbytes(two, 96) - saved_nbytes(one, 96)
    assert estimate(two, torch.float32, 96).block_nbytes == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_block_of_the_built_in_gpt_saves_what_is_estimated(dtype: torch.dtype) -> None:
    shapes = [GPTConfig(layers=layers, hidden=128, vocab=64, context=64) for layers in (1, 2)]
    one, two = (build_gpt(shape, "cpu").to(dtype) for shape in shapes)
    measured = saved_nbytes(two, 64) - saved_nbytes(one, 64)
    assert estimate(two, dtype, 64).block_nbytes == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CLASSES)
def test_logits_and_their_loss_take_what_is_estimated(name: str, dtype: torch.dtype) -> None:
    vocab, length = 4096, 32
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    if name == "Qwen3":
        sizes["head_dim"] = 4
    if name == "GPT2":
        sizes = {"n_embd": 8, "n_head": 2, "n_positions": length}
    model = build(name, sizes, "sdpa", 1, vocab_size=vocab).to(dtype)
    head = model.get_output_embeddings().weight.requires_grad_(False)  # type: ignore[operator,union-attr]
    tokens = torch.randint(vocab, (SAMPLES, length))
    with PeakBytes() as peak:
        output = model(tokens, labels=tokens)
        output.loss.backward()
    assert head.grad is None
    assert estimate(model, dtype, length).logits_nbytes == pytest.approx(peak.nbytes, rel=0.1)
