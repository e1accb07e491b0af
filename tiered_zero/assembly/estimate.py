"""Read from a model the sizes that estimates of its activations need."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tiered_zero.config.schema import Config
from tiered_zero.plan.activations import ActivationEstimate, BlockShape, estimate_activations


def estimate_of(model: nn.Module, config: Config, length: int | None = None) -> ActivationEstimate | None:
    """Estimate the activations of a micro-batch of samples of `length` tokens; None: as long as the model takes.
    Returns None for a model that does not say its sizes, as those of Hugging Face do."""
    sizes = _sizes_of(model)
    hidden, layers = _size(sizes, "hidden", "hidden_size", "n_embd"), _size(sizes, "layers", "num_hidden_layers")
    length = length or most_tokens(model)
    if not hidden or not layers or not length:
        return None
    return estimate_activations(
        _block_of(model, sizes, hidden, layers),
        samples=config.train_micro_batch_size_per_gpu,
        length=length,
        layers=layers,
        vocab=_size(sizes, "vocab", "vocab_size"),
        itemsize=4 if config.param_dtype_name == "float32" else 2,
    )


def most_tokens(model: nn.Module) -> int:
    """Return the tokens of the longest sample that the model says it takes; 0 for none."""
    return _size(_sizes_of(model), "context", "max_position_embeddings", "n_positions")


def idle_numel(model: nn.Module) -> int:
    """Count the elements of experts that a token does not pass through."""
    sizes = _sizes_of(model)
    used = _size(sizes, "num_experts_per_tok")
    of = _size(sizes, "num_local_experts", "num_experts", "n_routed_experts")
    if not 0 < used < of:
        return 0
    experts = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    return experts * (of - used) // of


def _sizes_of(model: nn.Module) -> Any:
    sizes: Any = getattr(model, "config", None)
    return sizes.get_text_config() if hasattr(sizes, "get_text_config") else sizes


def _size(sizes: Any, *names: str) -> int:
    """Return the first of the model's sizes that it says under one of these names; 0 for none."""
    return next((value for name in names if isinstance(value := getattr(sizes, name, None), int)), 0)


def _block_of(model: nn.Module, sizes: Any, hidden: int, layers: int) -> BlockShape:
    """Read a block's shape from the sizes that the model says, and from the names and classes of its modules."""
    names = {name.rpartition(".")[2] for name, _ in (*model.named_modules(), *model.named_parameters())}
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    weights = [weight for module in norms if isinstance(weight := getattr(module, "weight", None), Tensor)]
    heads = _size(sizes, "heads", "num_attention_heads") or 1
    head_size = _size(sizes, "head_dim") or hidden // heads
    dropouts = (getattr(sizes, name, None) for name in ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob"))
    return BlockShape(
        hidden=hidden,
        ffn=_size(sizes, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * hidden,
        heads=heads,
        query=heads * head_size,
        key=(_size(sizes, "num_key_value_heads") or heads) * head_size,
        norms=sum(weight.numel() == hidden for weight in weights) // layers,
        fp32_norms=not any(isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) for norm in norms),
        norms_heads="q_norm" in names,
        gated=not names.isdisjoint({"gate_proj", "gate_up_proj", "w3"}),
        activation=str(getattr(sizes, "hidden_act", None) or getattr(sizes, "activation_function", "gelu")),
        experts=_size(sizes, "num_experts_per_tok"),
        masks=any(dropouts),
        eager=getattr(sizes, "_attn_implementation", None) == "eager",
        fp32_scores=getattr(sizes, "model_type", None) != "gpt2",
    )
