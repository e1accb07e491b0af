"""The model and the ranks that `tiered-zero plan` plans; the model is built on the `meta` device, without memory."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tiered_zero.assembly.spec import PlannedMachine, RunSpec, specify_run
from tiered_zero.config.json_file import read_json
from tiered_zero.config.schema import Config
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.errors import ConfigError
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.plan.activations import ActivationEstimate, BlockShape, estimate_activations
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.rules.from_config import check_sections


def build_planned(source: GPTConfig | Path | str) -> nn.Module:
    """Build the built-in GPT of a shape, the model of a Hugging Face config.json, or what `module:function` returns.

    Raises ConfigError if it cannot be built.
    """
    if isinstance(source, GPTConfig):
        return build_gpt(source)
    try:
        with torch.device("meta"):
            return _of_hugging_face(source) if isinstance(source, Path) else _of_function(source)
    except ConfigError:
        raise
    except Exception as error:  # of foreign code
        raise ConfigError(
            f"The model {source} cannot be built on the meta device: {type(error).__name__}: {error}"
        ) from error


class _PlannedRanks:
    """Rank 0 of ranks that do not run: the others say what it says."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def exchange(self, data: bytes, what: str = "", *, kind: str = "") -> list[bytes]:
        return [data] * self.world_size


def specify_planned(
    config: Config,
    model: nn.Module,
    ranks: int = 1,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
) -> RunSpec:
    """Specify rank 0's run. `device_nbytes`, `host_nbytes`: of the machine, which the ranks share; None: this one's."""
    check_sections(config)
    machine = PlannedMachine(device_nbytes=device_nbytes, host_nbytes=host_nbytes, ranks=ranks)
    collects = gc.isenabled()
    gc.disable()  # a million records, all in use: looking for garbage takes 60% of the time for 70e9 parameters
    try:
        return specify_run(config, model, machine=machine, collectives=cast(Collectives, _PlannedRanks(ranks)))
    finally:
        if collects:
            gc.enable()


def estimate_of(
    model: nn.Module, source: GPTConfig | Path | str, config: Config, length: int | None
) -> ActivationEstimate | None:
    """Estimate the activations of a micro-batch of samples of `length` tokens; None: as long as the model takes. None
    for a model that does not say its sizes, as those of Hugging Face do."""
    sizes: Any = source if isinstance(source, GPTConfig) else getattr(model, "config", None)
    sizes = sizes.get_text_config() if hasattr(sizes, "get_text_config") else sizes
    hidden, layers = _size(sizes, "hidden", "hidden_size", "n_embd"), _size(sizes, "layers", "num_hidden_layers")
    length = length or _size(sizes, "context", "max_position_embeddings", "n_positions")
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


def count_parameters(model: nn.Module) -> int:
    """Tied weights count once."""
    return sum(param.numel() for param in model.parameters())


def _of_hugging_face(path: Path) -> nn.Module:
    """Build the first of the config's architectures, from its numbers alone: nothing is downloaded."""
    values = read_json(path / "config.json" if path.is_dir() else path)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--model-config needs transformers, which knows the models ({error}). Install it, or give --model "
            "module:function."
        ) from error
    known = transformers.CONFIG_MAPPING
    if values.get("model_type") not in known:
        raise ConfigError(
            f"{path}: model_type: expected one that transformers {transformers.__version__} has; found "
            f"{values.get('model_type')!r}. Give --model module:function for a model of your own."
        )
    config = known[values["model_type"]].from_dict(values)
    names = values.get("architectures") or ()
    found: Any = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    build: Any = found or transformers.AutoModelForCausalLM.from_config
    model: nn.Module = build(config)
    return model


def _of_function(target: str) -> nn.Module:
    """Call `module:function`, with the working directory first on the path, as `python -m` has it."""
    module, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {target}: expected a function that returns a model; {error}.") from error
    finally:
        sys.path.remove("")
    model = function()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {target}: expected it to return a torch.nn.Module; found {type(model).__name__}.")
    return model
