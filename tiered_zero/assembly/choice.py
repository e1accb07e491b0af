"""Choose the placement with the shortest predicted step (`tiered_zero.placement: "auto"`).

The search sets only keys that the config leaves out and that do not change the results of training. It tries pairs of a
tier for parameters and a tier for state, and takes NVMe only if host memory is too small. For each pair it moves bytes
to faster tiers, first to the device, until these tiers are full.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from torch import Tensor, nn

from tiered_zero.assembly.machine_rates import TO_MEASURE, load_measured
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError, ModelError, PlanError
from tiered_zero.io.select import nearest_directory
from tiered_zero.plan.activations import ActivationEstimate, BlockShape, estimate_activations
from tiered_zero.plan.machine import DESCRIBED, Disk, Machine
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.request import RESERVED, RESERVED_SHARE
from tiered_zero.plan.step_time import StepSeconds, Work, forward_flops, missing_rates, predict_step
from tiered_zero.sizes import TIERS, format_nbytes

if TYPE_CHECKING:
    from tiered_zero.assembly.spec import RunSpec

MOST_ASSUMED_TOKENS = 4096
"""If the config does not give the tokens of a sample, a prediction assumes at most this many."""

CONFIG_NAME = "placement.json"

NUM_SHOWN = 3
NUM_TRIES = 4
"""The most tries to fill a tier. A try may exceed the tier's limit, because buffers grow with the bytes that rest on
the tier."""

LARGE_SUB_GROUP_NUMEL = 1 << 22
"""The `sub_group_size`, in elements, that the search tries besides the config's own. A larger value means the automatic
size."""

_ZERO, _OWN = "zero_optimization.", "tiered_zero."
_PARAM, _STATE = f"{_ZERO}offload_param.", f"{_ZERO}offload_optimizer."
_ON_DEVICE = f"{_ZERO}stage3_model_persistence_threshold"

Settings = Mapping[str, Any]
"""Path of a config key -> its value."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A config whose plan fits the machine, and its predicted step. `settings`: the keys that the search has set."""

    config: Config
    plan: Plan
    step: StepSeconds
    settings: Settings = field(default_factory=dict)

    @property
    def written_nbytes(self) -> int:
        """Bytes that a step writes to disks."""
        return sum(self.step.written_nbytes.values())

    @property
    def places(self) -> str:
        """Text with the bytes of parameters, state and gradients on each tier, the tier of activations, and the update
        policy."""
        words = []
        for what, kind in (("parameters", "param"), ("state", "state"), ("gradients", "gradient")):
            sizes = {tier: self.plan.nbytes(tier, kind) for tier in TIERS}
            on = [f"{tier} {format_nbytes(nbytes)}" for tier, nbytes in sizes.items() if nbytes]
            words.append(f"{what} on {' + '.join(on)}" if on else "")
        if self.plan.activations is not None:
            words.append(f"activations on {self.plan.activations.tier}")
        size = self.config.zero_optimization.sub_group_size
        words.append(f"update {self.plan.update_policy.policy}")
        words.append(f"sub_group_size {size}" if size == LARGE_SUB_GROUP_NUMEL else "")
        return ", ".join(filter(None, words))

    @property
    def text(self) -> str:
        """Describe the candidate in one line."""
        sizes = ", ".join(f"{tier} {format_nbytes(n)}" for tier in TIERS if (n := self.plan.nbytes(tier)))
        bound = self.step.bound_by
        return (
            f"{self.step.seconds:.3g} s a step, {self.step.by_resource[bound]:.3g} s of them {bound}: {self.places}; "
            f"in all {sizes}; {format_nbytes(self.written_nbytes)} written to disks"
        )


SAME_SHARE = 1.05
"""A predicted step counts as equal to the shortest if it takes at most this many times as long, because predictions are
not more exact."""


def _best_first(found: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates by the predicted seconds of a step. Several steps may count as equal to the shortest
    (SAME_SHARE). Among these, put those that keep the config's sub_group_size first, then those that write the fewest
    bytes to disks."""
    # a sub_group_size of 4 Mi elements, chosen for a predicted gain of 0.5%, took 1.17 times as long
    same_s = SAME_SHARE * min((each.step.seconds for each in found), default=0.0)

    def order(candidate: Candidate) -> tuple[float, bool, int, float]:
        seconds, sets_size = candidate.step.seconds, f"{_ZERO}sub_group_size" in candidate.settings
        return max(seconds, same_s), sets_size, candidate.written_nbytes, seconds

    return sorted(found, key=order)


@dataclass(kw_only=True)
class PlacementSearch:
    """Searches for the placement whose predicted step is shortest. `plan_of` plans a config; `predict` predicts a
    plan's step. `estimate` (activations of a micro-batch) and `disk_nbytes` (free bytes) are None if unknown. `errors`:
    the errors of all settings that `_plan` rejected."""

    config: Config
    plan_of: Callable[[Config], Plan]
    predict: Callable[[Plan], StepSeconds]
    estimate: ActivationEstimate | None = None
    disk_nbytes: int | None = None
    errors: list[Exception] = field(default_factory=list)

    def run(self) -> list[Candidate]:
        """Return the candidates that fit, best first. If activations fit in no candidate, return the candidates that
        lack the fewest bytes. If no plan fits memory, raise the last PlanError; if there is no PlanError, raise the
        last error. If no plan fits the disk, raise PlanError with the table of the plan that needs the fewest bytes on
        NVMe."""
        placements = [*self._placements()]
        plans = [each for each in placements if self._has_disk(each[1])]
        least = min((self._short_nbytes(plan) for _, plan in plans), default=0)
        fitting = {frozenset(settings.items()): (settings, plan) for settings, plan in plans}
        found = [self._candidate(*each) for each in fitting.values() if self._short_nbytes(each[1]) <= least]
        for best in _best_first(found)[:NUM_SHOWN]:
            for update in ("barrier", "overlapped"):
                for size in ({}, {f"{_ZERO}sub_group_size": LARGE_SUB_GROUP_NUMEL}):
                    settings = {**best.settings, f"{_OWN}update": update, **size}
                    plan = self._plan(settings)
                    if plan is not None and self._short_nbytes(plan) <= least and self._has_disk(plan):
                        found.append(self._candidate(settings, plan))
        if not found and placements:  # memory has room, the disk has not
            smallest = min((plan for _, plan in placements), key=lambda plan: plan.nbytes("nvme"))
            needed, free = format_nbytes(smallest.nbytes("nvme")), format_nbytes(self.disk_nbytes or 0)
            raise PlanError(
                f"No placement fits: the one with the fewest bytes on nvme needs {needed} there; {free} are free. "
                f"Take a larger disk, or a smaller tiered_zero.state_format.\n{smallest}"
            )
        if not found:
            last = next((error for error in reversed(self.errors) if isinstance(error, PlanError)), self.errors[-1])
            if isinstance(last, PlanError) and self._path is None:
                raise PlanError(
                    "Nothing fits memory alone. So that tiered_zero.placement auto may use a disk, name a directory in "
                    f"zero_optimization.offload_optimizer.nvme_path. {last}"
                )
            raise last
        by_places: dict[str, Candidate] = {}
        for candidate in _best_first(found):
            by_places.setdefault(candidate.places, candidate)
        return [*by_places.values()]

    def _plan(self, settings: Settings, *, fits: bool = True) -> Plan | None:
        """Return the plan of the config with `settings` filled in. If planning fails, or if `fits` and the plan exceeds
        a limit, add the error to `errors` and return None."""
        try:
            plan = self.plan_of(self.config.filled_in(settings))
            if fits:
                plan.check()
        except (ValidationError, ConfigError, ModelError, PlanError) as error:
            self.errors.append(error)
            return None
        return plan

    def _has_disk(self, plan: Plan) -> bool:
        """Return whether the disk has room for the plan; True if its free bytes are unknown."""
        return self.disk_nbytes is None or plan.nbytes("nvme") <= self.disk_nbytes

    def _candidate(self, settings: Settings, plan: Plan) -> Candidate:
        config = self.config.filled_in(settings)
        return Candidate(config=config, plan=plan, step=self.predict(plan), settings=settings)

    def _placements(self) -> Iterator[tuple[Settings, Plan]]:
        """Yield (settings, plan) for pairs of a tier for parameters and a tier for state, the slowest pair last. Skip a
        pair with NVMe if the same pair with host memory fits."""
        zero = self.config.zero_optimization
        path = self._path
        pages = "stage" not in zero.model_fields_set or zero.stage == 3
        fits: set[tuple[str, str]] = set()
        for param, state in itertools.product(self._devices if pages else ("none",), self._devices):
            if (param == "nvme" and ("cpu", state) in fits) or (state == "nvme" and (param, "cpu") in fits):
                continue  # host memory has room for all of it
            settings: dict[str, Any] = {f"{_PARAM}device": param, f"{_STATE}device": state}
            settings |= {f"{section}nvme_path": path for section in (_PARAM, _STATE) if path}
            if param != "none":
                settings |= {f"{_ZERO}stage": 3, f"{_PARAM}max_in_cpu": 0, _ON_DEVICE: 0}
            for order in (("param", "state"), ("state", "param"))[: 1 if "none" in (param, state) else 2]:
                for found in self._fill(settings, order):
                    fits.add((param, state))
                    yield found

    @property
    def _path(self) -> Any:
        zero = self.config.zero_optimization
        sections = (zero.offload_optimizer, zero.offload_param, self.config.tiered_zero.activations)
        return next((section.nvme_path for section in sections if section.nvme_paths), None)

    @property
    def _devices(self) -> tuple[str, ...]:
        return ("none", "cpu", "nvme") if self._path else ("none", "cpu")

    def _fill(self, settings: Settings, on_device: Sequence[str]) -> Iterator[tuple[Settings, Plan]]:
        """Move more bytes to faster tiers until these are full. Yield (settings, plan) for each extension of `settings`
        that fits. If `settings` do not fit, yield nothing. `on_device`: the kinds ("param", "state") that go to the
        device, in this order."""
        plan = self._plan(settings)
        if plan is None:
            return
        moved = f"{_OWN}activations."
        if self.estimate is not None and self._short_nbytes(plan) and f"{moved}device" not in settings:
            more = {f"{moved}limit": self.estimate.budget_nbytes, f"{moved}nvme_path": self._path}
            for device in self._devices[1:]:
                yield from self._fill({**settings, **more, f"{moved}device": device}, on_device)
        if plan.nbytes("nvme", "state") and not plan.nbytes("nvme", "gradient"):
            settings = {**settings, f"{_OWN}gradients": "cpu"}  # they spare the disk at least as much as state does
        for kind in on_device if "device" in plan.limits else ():
            settings, plan = self._grow(settings, plan, "device", kind)
        for kind in ("param", "state"):  # parameters first: forward and backward read them too
            if plan.nbytes("nvme", kind):
                settings, plan = self._grow(settings, plan, "host", kind)
        yield settings, plan

    def _grow(self, settings: Settings, plan: Plan, tier: str, kind: str) -> tuple[Settings, Plan]:
        """Put as much of `kind` on `tier` as fits. Return the new settings and plan. If nothing fits, return `settings`
        and `plan` as given."""
        itemsize, room_of = 4 if self.config.param_dtype_name == "float32" else 2, self._room_nbytes
        room = min(room_of(plan, tier), sum(plan.nbytes(other, kind) for other in TIERS))
        for _ in range(NUM_TRIES):
            if room <= 0:
                break
            if kind == "state":
                more = {f"{_OWN}state_limits.{tier}": room}
            elif tier == "host":
                more = {f"{_PARAM}max_in_cpu": room // itemsize}
            else:
                numel = (plan.nbytes("device", "param") + room) // itemsize
                more = {f"{_ZERO}stage3_param_persistence_threshold": numel, _ON_DEVICE: numel}
            grown = self._plan({**settings, **more}, fits=False)
            if grown is None or grown.rows == plan.rows:
                break
            missing = sum(max(0, min(0, room_of(plan, each)) - room_of(grown, each)) for each in grown.limits)
            if tier in grown.pager_limits.limited_by and tier not in plan.pager_limits.limited_by:
                missing += plan.pager_limits.live_nbytes - grown.pager_limits.live_nbytes
            if missing <= 0:
                return {**settings, **more}, grown
            room -= missing
        return settings, plan

    def _short_nbytes(self, plan: Plan) -> int:
        """Return the bytes that plan and activations lack on the tier where the run computes; 0 if they fit."""
        return max(0, -self._room_nbytes(plan, plan.request.computing_tier))

    def _room_nbytes(self, plan: Plan, tier: str) -> int:
        """Return the bytes of the tier that plan and activations leave free; negative if they do not fit. Activations
        are counted only on the tier where the run computes, and only if the config sets no limit for this tier."""
        limit, source = plan.limits[tier]
        room = limit - plan.needed_nbytes(tier)
        if self.estimate is None or tier != plan.request.computing_tier or RESERVED not in source:
            return room  # a limit that the config sets is without activations
        return room - max(0, self.estimate.needed_nbytes(plan.activations) - limit // (RESERVED_SHARE - 1))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The placements that fit. `candidates`: best first; the run uses the first. `tokens`: tokens of a micro-batch."""

    candidates: tuple[Candidate, ...]
    tokens: int

    @property
    def config_text(self) -> str:
        """The chosen config as JSON, in the form of a config file."""
        values = self.candidates[0].config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return json.dumps(values, indent=2) + "\n"

    @property
    def lines(self) -> list[str]:
        """Lines for the log: a heading, and the predictions for the best candidates."""
        shown = self.candidates[:NUM_SHOWN]
        return [
            f"tiered_zero.placement: auto runs the first of {len(self.candidates)} that fit, by the predicted step of "
            f"{self.tokens} tokens a micro-batch; of steps within {SAME_SHARE - 1:.0%} of the shortest, the default "
            "sub_group_size goes first, then the fewest bytes written to disks",
            *(f"  {number}. {candidate.text}" for number, candidate in enumerate(shown, 1)),
        ]

    def save(self, path: Path) -> None:
        """Write the chosen config to `path`; a new file gets mode 0600. Raises OSError."""
        with open(path, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(self.config_text.encode())


def choose_placement(
    config: Config, model: nn.Module, plan_of: Callable[[Config], Plan], rates: Machine | None, world_size: int
) -> Choice:
    """Return the placements that fit, sorted by predicted seconds of a step. Without `rates`, use those measured on
    this machine. Raises ConfigError with several ranks or if a rate is missing, and what `PlacementSearch.run`
    raises."""
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
    """Return a function that predicts a step of a plan, for `model` and the batch of `config`. Without `rates`, use
    those measured on this machine. `finds_hidden`: whether the function also searches how many tokens a step needs so
    that transfers take no longer than compute. Raises ConfigError if `rates` is None and none were measured. The
    function raises ConfigError if a rate is missing."""
    machine, length = rates or _rates_here(_paths(config)), _length(config, model)
    estimate, tokens = estimate_of(model, config, length), length * config.train_micro_batch_size_per_gpu
    dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[config.param_dtype_name]
    idle = _idle_numel(model)
    width = estimate.boundaries_nbytes // (tokens * (4 if dtype == "fp32" else 2)) if estimate is not None else 0

    def predict(plan: Plan) -> StepSeconds:
        work = Work(
            tokens=tokens,
            forward_flops=forward_flops(plan.tiers.units, tokens, length=length, width=width) - 2.0 * tokens * idle,
            accumulation=config.gradient_accumulation_steps,
            dtype=dtype,
            num_block_elements=tokens * width,
            num_logits=tokens * _size(_sizes_of(model), "vocab", "vocab_size"),
            num_tensors=sum(param.requires_grad for param in model.parameters()),
            recomputes=any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
            activation_nbytes=estimate.offloaded_nbytes(plan.activations) if estimate is not None else 0,
        )
        if missing := missing_rates(plan, work, machine):
            way = f"Add them to its file, or, for this machine, {TO_MEASURE}"
            if machine.name == DESCRIBED:
                way = "Sizes alone do not give them: name a file with rates, as in configs/machines (--machine FILE)"
            if is_auto := config.tiered_zero.placement == "auto":
                way += ", or leave tiered_zero.placement out"
            what = "tiered_zero.placement auto needs predicted seconds" if is_auto else "No seconds are predicted"
            raise ConfigError(f"{what}; rates of {machine.name} are not known: {', '.join(missing)}. {way}.")
        return predict_step(plan, work, machine, finds_hidden=finds_hidden)

    return predict


def predicted_seconds(config: Config, model: nn.Module, plan: Plan) -> dict[str, float]:
    """Return the predicted step for the run's report: "tokens" -> its tokens, "step" -> its seconds, each resource ->
    its busy seconds. Return {} without measured rates, with several ranks, or without an optimizer in the config."""
    if plan.request.world_size > 1 or config.optimizer is None:
        return {}
    try:
        step = make_predictor(config, model)(plan)
    except ConfigError:
        return {}
    return {"tokens": float(step.tokens), "step": step.seconds, **step.by_resource}


def _length(config: Config, model: nn.Module) -> int:
    """Return the tokens of a sample: the config's number, else the most that the model takes, up to
    MOST_ASSUMED_TOKENS."""
    most = _most_tokens(model) or MOST_ASSUMED_TOKENS
    return config.tiered_zero.sequence_length or min(most, MOST_ASSUMED_TOKENS)


def _paths(config: Config) -> tuple[str, ...]:
    zero = config.zero_optimization
    activations = config.tiered_zero.activations
    return zero.offload_optimizer.nvme_paths or zero.offload_param.nvme_paths or activations.nvme_paths


def _free_nbytes(paths: Sequence[str], rates: Machine | None) -> int | None:
    """Return the bytes free for swap files; None if unknown. If `rates` lists disks, return the sum of their free
    bytes. Else return the free bytes on the disk of `paths` with the least room."""
    if rates is not None and rates.disks:
        sizes = [disk.nbytes for disk in rates.disks]
        return None if None in sizes else sum(filter(None, sizes))
    return min((shutil.disk_usage(nearest_directory(path)).free for path in paths), default=None)


def save_choice(run_spec: RunSpec) -> list[str]:
    """Write the chosen config to the folder of the run's report. Without a report, write it to the first swap
    directory. Return lines for the log."""
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
    """Return this machine's measured rates, with the disks that hold `paths`. Raises ConfigError if none were
    measured."""
    machine = load_measured()
    disks = tuple(disk for disk in (_disk_of(path, machine.disks) for path in paths) if disk is not None)
    return replace(machine, disks=disks)


def _disk_of(path: str, disks: Sequence[Disk]) -> Disk | None:
    """Return the disk of `disks` that lies on the file system of `path`; None if there is none. If several do, return
    the one measured last."""
    device = os.stat(nearest_directory(path)).st_dev
    same = [disk for disk in disks if os.path.isdir(disk.path) and os.stat(disk.path).st_dev == device]
    return same[-1] if same else None


def estimate_of(model: nn.Module, config: Config, length: int | None = None) -> ActivationEstimate | None:
    """Estimate the activations of a micro-batch. `length`: tokens of a sample; None: the most that the model takes.
    Return None if `model.config` does not have the sizes under the names that Hugging Face uses."""
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
    """Return the value of the first of `names` that is an integer in `sizes`, the model's config; 0 if there is
    none."""
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
