"""Choose the placement of a run by the rates of this machine, for `tiered_zero.placement: "auto"`. Read from a model
the sizes that predictions, and estimates of activations, need."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tiered_zero.assembly.rates import TO_MEASURE, load_measured
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError
from tiered_zero.io.select import nearest_directory
from tiered_zero.plan.activations import ActivationEstimate, BlockShape, estimate_activations
from tiered_zero.plan.choice import NUM_SHOWN, Candidate, PlacementSearch
from tiered_zero.plan.machine import Disk, Machine
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.step_time import StepSeconds, Work, forward_flops, missing_rates, predict_step
from tiered_zero.system import opened

if TYPE_CHECKING:
    from tiered_zero.assembly.spec import RunSpec

MOST_ASSUMED_TOKENS = 4096
"""The most tokens that a sample is assumed to have, if the config does not say."""

CONFIG_NAME = "placement.json"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The placements that fit, with predictions. `candidates`: best first; the run takes the first. `tokens`: tokens of
    a micro-batch."""

    candidates: tuple[Candidate, ...]
    tokens: int

    @property
    def config_text(self) -> str:
        """The chosen config as JSON, which `load` reads."""
        values = self.candidates[0].config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return json.dumps(values, indent=2) + "\n"

    @property
    def lines(self) -> list[str]:
        """Lines for the log: a heading, and the predictions for the best candidates."""
        shown = self.candidates[:NUM_SHOWN]
        return [
            f"tiered_zero.placement: auto runs the first of {len(self.candidates)} that fit, by the predicted step of "
            f"{self.tokens} tokens a micro-batch",
            *(f"  {number}. {candidate.text}" for number, candidate in enumerate(shown, 1)),
        ]

    def save(self, path: Path) -> None:
        """Write the chosen config, mode 0600. Raises OSError."""
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) as fd:
            os.write(fd, self.config_text.encode())


def choose_placement(
    config: Config, model: nn.Module, plan_of: Callable[[Config], Plan], rates: Machine | None, world_size: int
) -> Choice:
    """Plan the placements that fit, and sort them by predicted seconds of a step. `plan_of`: returns the plan for a
    config. `rates`: the rates to predict with; None: those that were measured on this machine. Raises ConfigError if
    there are none, and with several ranks, whose collectives are not predicted."""
    if world_size > 1:
        raise ConfigError(
            f"tiered_zero.placement: expected as_written with {world_size} ranks, whose collectives are not predicted; "
            "found auto. Leave it out, and take what `tiered-zero plan CONFIG --choose OUT.json` writes for one rank."
        )
    length = _length(config, model)
    search = PlacementSearch(
        config=config,
        plan_of=plan_of,
        predict=make_predictor(config, model, rates),
        estimate=estimate_of(model, config, length),
        disk_nbytes=_free_nbytes(_paths(config), rates),
    )
    return Choice(candidates=tuple(search.run()), tokens=length * config.train_micro_batch_size_per_gpu)


def make_predictor(
    config: Config, model: nn.Module, rates: Machine | None = None, *, finds_hidden: bool = False
) -> Callable[[Plan], StepSeconds]:
    """Return a function that predicts the step of a plan, for the model and batch of `config`. `rates`: see
    `choose_placement`. `finds_hidden`: see `predict_step`. Raises ConfigError."""
    machine, length = rates or _rates_here(_paths(config)), _length(config, model)
    estimate, tokens = estimate_of(model, config, length), length * config.train_micro_batch_size_per_gpu
    dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[config.param_dtype_name]
    idle = _idle_numel(model)
    width = estimate.boundaries_nbytes // (tokens * (4 if dtype == "fp32" else 2)) if estimate is not None else 0

    def predict(plan: Plan) -> StepSeconds:
        work = Work(
            tokens=tokens,
            forward_flops=forward_flops(plan.units, tokens, length=length, width=width) - 2.0 * tokens * idle,
            accumulation=config.gradient_accumulation_steps,
            dtype=dtype,
            num_block_elements=tokens * width,
            num_logits=tokens * _size(_sizes_of(model), "vocab", "vocab_size"),
            num_tensors=sum(param.requires_grad for param in model.parameters()),
            recomputes=any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
            activation_nbytes=estimate.offloaded_nbytes(plan.activations) if estimate is not None else 0,
        )
        if missing := missing_rates(plan, work, machine):
            raise ConfigError(
                f"No seconds are predicted: {', '.join(missing)} of {machine.name} are not known. Add them to its "
                f"file, or, for this machine, {TO_MEASURE}."
            )
        return predict_step(plan, work, machine, finds_hidden=finds_hidden)

    return predict


def predicted_seconds(config: Config, model: nn.Module, plan: Plan) -> dict[str, float]:
    """Return the tokens and seconds of a step, and the seconds of each lane, for the run's report. Return nothing if
    the rates of this machine are not known, or with several ranks."""
    if plan.request.world_size > 1 or config.optimizer is None:
        return {}
    try:
        step = make_predictor(config, model)(plan)
    except ConfigError:
        return {}
    return {"tokens": float(step.tokens), "step": step.seconds, **step.by_resource}


def _length(config: Config, model: nn.Module) -> int:
    """Return the tokens of a sample, from the config or the model, else an assumed number."""
    most = _most_tokens(model) or MOST_ASSUMED_TOKENS
    return config.tiered_zero.sequence_length or min(most, MOST_ASSUMED_TOKENS)


def _paths(config: Config) -> tuple[str, ...]:
    zero = config.zero_optimization
    return zero.offload_optimizer.nvme_paths or zero.offload_param.nvme_paths


def _free_nbytes(paths: Sequence[str], rates: Machine | None) -> int | None:
    """Return the number of bytes free for swap files: on the disks of `rates`, if it names any, or in the directories;
    None if unknown."""
    if rates is not None and rates.disks:
        sizes = [disk.nbytes for disk in rates.disks]
        return None if None in sizes else sum(filter(None, sizes))
    return min((shutil.disk_usage(nearest_directory(path)).free for path in paths), default=None)


def save_choice(run_spec: RunSpec) -> list[str]:
    """Write the chosen config next to the run's report, or else in its swap directory. Return lines for the log."""
    choice, report = run_spec.choice, run_spec.config.tiered_zero.report
    if choice is None:
        return []
    folder = os.path.dirname(report) if report is not None else next(iter(_paths(run_spec.config)), None)
    if folder is None:
        return choice.lines
    path = Path(folder, CONFIG_NAME)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        choice.save(path)
    except OSError as error:
        return [*choice.lines, f"tiered_zero.placement: the chosen config cannot be written: {error}"]
    return [*choice.lines, f"tiered_zero.placement: the chosen config is {path}"]


def _rates_here(paths: Sequence[str]) -> Machine:
    """Return the measured rates of this machine, with only those disks that hold these directories. Raises ConfigError
    if nothing was measured."""
    machine = load_measured()
    disks = tuple(disk for disk in (_disk_of(path, machine.disks) for path in paths) if disk is not None)
    return replace(machine, disks=disks)


def _disk_of(path: str, disks: Sequence[Disk]) -> Disk | None:
    """Return the measured disk that has the file system of `path`; None if there is none."""
    device = os.stat(nearest_directory(path)).st_dev
    same = [disk for disk in disks if os.path.isdir(disk.path) and os.stat(disk.path).st_dev == device]
    return same[-1] if same else None


def estimate_of(model: nn.Module, config: Config, length: int | None = None) -> ActivationEstimate | None:
    """Estimate the activations of a micro-batch. `length`: tokens of a sample; None: as many as the model takes. Return
    None for a model whose `config` lacks the sizes that those of Hugging Face models have."""
    sizes = _sizes_of(model)
    hidden, layers = _size(sizes, "hidden", "hidden_size", "n_embd"), _size(sizes, "layers", "num_hidden_layers")
    length = length or _most_tokens(model)
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


def _most_tokens(model: nn.Module) -> int:
    """Return the most tokens of a sample that the model's config names; 0 if it names none."""
    return _size(_sizes_of(model), "context", "max_position_embeddings", "n_positions")


def _idle_numel(model: nn.Module) -> int:
    """Count the elements of the experts that a token does not pass through."""
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
    """Return the model's size under the first of `names` that its config has; 0 if it has none of them."""
    return next((value for name in names if isinstance(value := getattr(sizes, name, None), int)), 0)


def _block_of(model: nn.Module, sizes: Any, hidden: int, layers: int) -> BlockShape:
    """Read a block's shape from the sizes in the model's config, and from the names and classes of its modules."""
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
