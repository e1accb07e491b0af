"""Specify a run from a config and a model, before a byte is allocated: units, sub-groups, rule and plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tiered_zero.assembly.choice import Choice, choose_placement
from tiered_zero.config.schema import Config
from tiered_zero.errors import ModelError, RankError
from tiered_zero.hardware.probe import available_device_nbytes, available_host_nbytes
from tiered_zero.hardware.ranks.collectives import Collectives, agree
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.hardware.runtime import find_device, shares_cores
from tiered_zero.layout.flat import CUT_NUMEL, ParamSpec, Unit, UnitRules, find_units
from tiered_zero.layout.subgroups import MAX_SUB_GROUP_NUMEL, MAX_SUB_GROUPS, SubGroup, cut_subgroups, sub_group_numel
from tiered_zero.native.update import num_kernel_threads
from tiered_zero.plan.machine import Machine
from tiered_zero.plan.planner import Plan, make_plan
from tiered_zero.plan.request import (
    Limits,
    PlanRequest,
    SubGroupSize,
    describe_resolved_tiers,
    limit_of,
    resolve_host_tiers,
    splits_masters_off_device,
    unit_rules,
)
from tiered_zero.rules.from_config import group_params, make_optimizer, make_rule
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.state_layout import StateLayout, check_params, master_format
from tiered_zero.sizes import TIERS, align_up, format_nbytes
from tiered_zero.unit.guard import ClosedEngine, handler_of
from tiered_zero.unit.model import check_memory, list_params, module_tree, packed_nbytes, persistent_buffers


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """The machine to plan for. `device_nbytes`, `host_nbytes`: the machine's free memory, used instead of the config's
    limit; None: take the config's limit or the free memory of this machine. `ranks`: the number of processes that share
    the machine. `sources`: the origins of `device_nbytes` and `host_nbytes`, as messages name them."""

    device_nbytes: int | None = None
    host_nbytes: int | None = None
    ranks: int = 1
    sources: tuple[str, str] = ("--device-memory", "--host-memory")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The specification of a run: everything that can be known before a byte is allocated."""

    config: Config
    effective_config: Config
    """`config`, with the offload devices that this run uses: if the CPU computes, "cpu" may become "none"."""
    model: nn.Module
    specs: dict[nn.Parameter, ParamSpec]
    units: list[Unit]
    source: Optimizer
    group_of: dict[str, int]
    """Name of a parameter that the optimizer holds -> the index of its param group."""
    rule: UpdateRule
    subgroups: list[SubGroup]
    plan: Plan
    sub_group_numel: int
    """The most elements of a sub-group. If the rule steps whole parameters, units are not cut, and a unit with more
    elements is one sub-group."""
    choice: Choice | None = None
    """The placements that `tiered_zero.placement: "auto"` has compared; None without it."""

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer; without one the run evaluates."""
        return bool(self.group_of)

    @cached_property
    def layouts(self) -> list[StateLayout]:
        """The layout of each sub-group's slot."""
        groups, masters = self.source.param_groups, master_format(self.plan.request.state_format)
        return [StateLayout(subgroup, self.rule, groups, masters) for subgroup in self.subgroups]

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that an update changes, on any rank."""
        params = (entry.param for unit in self.units if unit.trainable for entry in unit.entries)
        return frozenset(param.name for param in params if param.numel and param.name in self.group_of)

    def params_of(self, unit: Unit) -> list[nn.Parameter]:
        """List the parameters of a unit in the order of its entries."""
        return [self._param_by_index[entry.param.index] for entry in unit.entries]

    @cached_property
    def _param_by_index(self) -> dict[int, nn.Parameter]:
        return {spec.index: param for param, spec in self.specs.items()}


def specify_run(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    machine: PlannedMachine | None = None,
    collectives: Collectives | None = None,
    rates: Machine | None = None,
) -> RunSpec:
    """Cut the model into units and sub-groups and plan the bytes of a run. Reads no parameter's bytes. Without an
    optimizer the run evaluates. `machine`: the machine to plan for; default: this one. `rates`: the measured speeds by
    which placement "auto" chooses; default: those of this machine. Every rank calls this. Raises ConfigError,
    ModelError, and RankError if plans differ."""
    ranks = collectives or Collectives()
    _check_delayed(config, ranks.world_size)
    trains = optimizer is not None or config.optimizer is not None
    specs = list_params(model, partial(compute_dtype, config), trains)
    _check_params(specs, trains)
    _check_embeddings(model)
    check_memory(model, specs)
    source = make_optimizer(config.optimizer, model, optimizer, model_parameters)
    cut = _Cut(model, specs, source)
    specify = partial(_specify, cut=cut, machine=machine or PlannedMachine(), ranks=ranks)
    choice: Choice | None = None
    if config.tiered_zero.placement == "auto":
        choice = choose_placement(config, model, lambda each: specify(each).plan, rates, ranks.world_size)
        config = choice.candidates[0].config
    run_spec = replace(specify(config), choice=choice)
    if ranks.world_size > 1:  # before anything is allocated
        compare_facts(_facts(run_spec), ranks.exchange)
    return replace(run_spec, plan=_with_common_window(run_spec.plan, ranks))


NUM_CUTS_KEPT = 4
"""The number of cuts (of a model into sub-groups) that the cache keeps. For 70 billion parameters, a cut takes a second
and 100 MB."""


class _Cut:
    """Makes the rule, units and sub-groups of a model. Caches the last results, because a search for a placement plans
    the model many times."""

    def __init__(self, model: nn.Module, specs: dict[nn.Parameter, ParamSpec], source: Optimizer) -> None:
        self.model, self.specs, self.source = model, specs, source
        self.group_of = group_params(source, specs) if source.param_groups else {}
        self._tree = module_tree(model, specs)
        self.find_units = lru_cache(NUM_CUTS_KEPT)(self._find_units)
        self.cut = lru_cache(NUM_CUTS_KEPT)(self._cut)
        self.make_rule = lru_cache(1)(partial(_make_rule, source))

    def _find_units(self, rules: UnitRules) -> list[Unit]:
        return find_units(self._tree, list(self.specs.values()), rules)

    def _cut(
        self, rules: UnitRules, rule: UpdateRule, state_format: str, apart: bool, rank: int | None, numel: int
    ) -> tuple[list[SubGroup], list[SubGroupSize]]:
        """Return the sub-groups, and the sizes of their slots. `numel`: see `RunSpec.sub_group_numel`. `apart`: whether
        embeddings get sub-groups of their own. `rank`: cut this rank's shards; None: cut whole units."""
        subgroups = cut_subgroups(
            self.find_units(rules), self.group_of, numel, elementwise=rule.elementwise, apart=apart, rank=rank
        )
        masters, known = master_format(state_format), dict[Any, int]()
        sizes = []
        for subgroup in subgroups:
            groups = frozenset(piece.group for segment in subgroup.segments for piece in segment.pieces)
            key = (subgroup.numel, groups) if rule.elementwise else subgroup.index  # equal keys, equal sizes
            if key not in known:
                known[key] = StateLayout(subgroup, rule, self.source.param_groups, masters).nbytes
            sizes.append(SubGroupSize(state_nbytes=known[key], parts=subgroup.parts, embedding=subgroup.embedding))
        return subgroups, sizes


def _specify(config: Config, *, cut: _Cut, machine: PlannedMachine, ranks: Collectives) -> RunSpec:
    """Specify a run under `config`. While the plan does not fit host memory, halve the size of sub-groups. Stop if
    there would be too many sub-groups, or if the plan has no staging buffers for state. The caller must have checked
    parameters and optimizer."""
    effective, request = _request(config, cut.model, machine, ranks)
    rule = cut.make_rule(request.state_format, request.world_size, request.shards_params, request.shares_cores)
    if machine.device_nbytes is not None or find_device(config.tiered_zero.device).type != "cpu":
        request = replace(request, temporaries=rule.temporaries)
    rules = unit_rules(effective, ranks.world_size, whole_params=not rule.elementwise)
    units = cut.find_units(rules)
    rank = ranks.rank if request.shards_state else None
    numel = sub_group_numel(
        config.zero_optimization.sub_group_size,
        units,
        in_memory=request.state_tier != "nvme" and not request.splits_state,
        shares_cores=request.shares_cores,
    )
    least = sub_group_numel(1, units)
    while True:
        subgroups, sizes = cut.cut(rules, rule, request.state_format, request.splits_state, rank, numel)
        _check_group_state(rule, request)  # the rule knows of such state from its first layout on
        # such state must not change before step(), so no update begins in backward
        request = replace(request, keeps_group_state=rule.keeps_group_state)
        plan = make_plan(units, sizes, request)
        half = max(align_up(numel // 2, CUT_NUMEL), least)
        if half >= numel or plan.missing_nbytes("host") <= 0 or not plan.staging.state.count:
            break
        numel = half
    param_tiers = {placed.unit: placed.param_tier for placed in plan.tiers.units}
    check_params(master_format(request.state_format), subgroups, param_tiers, plan.tiers.state)
    return RunSpec(
        config=config,
        effective_config=effective,
        model=cut.model,
        specs=cut.specs,
        units=units,
        source=cut.source,
        group_of=cut.group_of,
        rule=rule,
        subgroups=subgroups,
        plan=plan,
        sub_group_numel=numel,
    )


def _check_delayed(config: Config, world_size: int) -> None:
    """Raise ModelError if delayed updates are asked for with several ranks at stage 1 or 2, where step() gathers the
    parameters."""
    stage = config.zero_optimization.stage
    if world_size > 1 and config.tiered_zero.update == "delayed" and stage in (1, 2):
        raise ModelError(
            f"tiered_zero.update: expected auto or barrier at stage {stage} with {world_size} ranks, which gather "
            "each other's new parameters inside step(); found 'delayed'. Leave it out, or set zero_optimization.stage "
            "to 0 or 3."
        )


def _request(
    config: Config, model: nn.Module, machine: PlannedMachine, ranks: Collectives
) -> tuple[Config, PlanRequest]:
    """Return the effective config (with the tiers that this run really uses) and the planner's request."""
    limits, settings = _limits(config, model, machine, ranks), config.tiered_zero
    on_cpu = machine.device_nbytes is None and shares_cores(settings.device, settings.debug_delay_seed)
    effective = resolve_host_tiers(config, limits, shares_cores=on_cpu, world_size=ranks.world_size)
    request = PlanRequest(
        config=effective,
        limits=limits,
        shares_cores=on_cpu,
        device_is_host=on_cpu,
        segments=machine.device_nbytes is not None or find_device(settings.device).type == "cuda",
        buffers_nbytes=packed_nbytes(persistent_buffers(model).values()),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return effective, request


def _make_rule(
    source: Optimizer, state_format: str, world_size: int, steps_parts: bool, shares_cores: bool
) -> UpdateRule:
    """Make the update rule of the optimizer `source`. `steps_parts`: whether each rank steps only parts of parameters.
    `shares_cores`: whether forward and backward run on the CPU, too. Raises ModelError if the rule cannot step parts,
    and ConfigError if it cannot use `state_format`."""
    threads = num_kernel_threads(shares_cores=shares_cores)
    rule = make_rule(source, state_format, steps_parts=steps_parts, num_threads=threads)
    if steps_parts and not rule.elementwise:
        raise ModelError(
            f"{rule.name} steps whole parameters, and at stage 3 each of {world_size} ranks has a part of them. "
            "Set zero_optimization.stage to 2, where each rank steps parameters of its own, or take Adam, AdamW, SGD, "
            "Adagrad or Lion."
        )
    return rule


def _check_group_state(rule: UpdateRule, request: PlanRequest) -> None:
    """Raise ModelError if the rule keeps state for whole param groups, and each rank steps only a part of a group."""
    if rule.keeps_group_state and request.shards_state:
        stage = request.config.zero_optimization.stage
        raise ModelError(
            f"{rule.name} keeps state of whole param groups, and at stage {stage} each of {request.world_size} "
            "ranks steps a part of them. Set zero_optimization.stage to 0."
        )


def _facts(run_spec: RunSpec) -> dict[str, Any]:
    """Return name -> value for the facts that must be equal on all ranks. Devices, paths and files may differ."""
    config, plan, units = run_spec.config, run_spec.plan, run_spec.units
    path: dict[str, Any] = {"nvme_path": True}
    zero = {"offload_param": path, "offload_optimizer": path}
    own: dict[str, Any] = {"tiered_zero": True, "aio": True, "zero_optimization": zero}
    facts: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json", exclude=own).items():
        facts |= {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
    parameters = {
        spec.name: {
            "place": spec.index,
            "shape": spec.shape,
            "dtype": str(spec.dtype),
            "requires_grad": spec.trainable,
            "tied names": spec.aliases,
            "stride": spec.stride,
            "use as an embedding": spec.embedding,
        }
        for spec in run_spec.specs.values()
    }
    buffers = {
        name: {"shape": tuple(buffer.shape), "dtype": str(buffer.dtype)}
        for name, buffer in run_spec.model.named_buffers()
    }
    settings = config.tiered_zero
    return {
        **facts,
        "optimizer": run_spec.rule.name if run_spec.trains else None,
        "parameters": parameters,
        "buffers": buffers,
        "modules around parameters": {unit.name: [entry.param.name for entry in unit.entries] for unit in units},
        "param groups": run_spec.group_of,
        "update policy": plan.update_policy.policy,
        "tiered_zero.delay_start_step": settings.delay_start_step if plan.delayed else None,
        "tiered_zero.state_format": plan.request.state_format,
        "tiered_zero.checkpoint.in_place": settings.checkpoint.in_place,
        "tiered_zero.checkpoint.resume, a directory that all hosts share, or null": (
            None if settings.checkpoint.resume is None else "a directory"
        ),
        "tiers of parameters": {placed.unit.name: placed.param_tier for placed in plan.tiers.units},
    }


Exchange = Callable[[bytes, str], list[bytes]]
"""exchange(data, what): send `data` to every rank, and return the data of all ranks in rank order."""


def compare_facts(facts: Mapping[str, Any], exchange: Exchange) -> None:
    """Raise RankError on every rank if `facts` (name -> a JSON value) differ between ranks. Every rank calls this."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    if len(set(exchange(digest, "the plan"))) == 1:  # the values of a large model are long
        return
    found = [json.loads(message) for message in exchange(json.dumps(facts).encode(), "the plan of each rank")]
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            (what, *inner), first, other = _first_difference(found[0], theirs)
            where = "".join(f"{each} of " for each in reversed(inner)).removesuffix(" of ")
            raise RankError(
                f"All ranks must have the same {what}; found {where}{' ' if where else ''}{_text(first)} on "
                f"rank 0, {_text(other)} on rank {rank}. Build the model, the optimizer and the config in the same "
                "way on all of them."
            )


def _first_difference(first: Any, other: Any, path: Sequence[str] = ()) -> tuple[Sequence[str], Any, Any]:
    """Return the path of the first value that differs between `first` and `other`, and the value in each. None stands
    for a missing value."""
    if isinstance(first, dict) and isinstance(other, dict):
        # keys of one side first: they change the values of other keys
        alone = [key for key in (*first, *other) if (key in first) != (key in other)]
        for key in (*alone, *first):
            if first.get(key) != other.get(key):
                return _first_difference(first.get(key), other.get(key), (*path, key))
    return path, first, other


def _text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _with_common_window(plan: Plan, ranks: Collectives) -> Plan:
    """Return the plan with the same room for paged parameters on all ranks: the least that any rank has. If ranks do
    not shard parameters, return `plan`."""
    if not plan.request.shards_params:
        return plan
    own = plan.pager_limits  # the order of gathers depends on it, and must be equal on all ranks
    found = agree(ranks, "room for parameters", lambda: [own.live_nbytes, own.most_live_nbytes])
    live, most_live = map(min, zip(*found, strict=True))
    return replace(plan, pager_limits=replace(own, live_nbytes=live, most_live_nbytes=most_live))


def _check_embeddings(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"{type(module).__name__} {name!r} has max_norm={module.max_norm:g}: its forward changes rows of its "
                "weight, and the next update, which starts from the values on the tiers, would undo that. Build it "
                "without max_norm; rows can be limited after step(), inside `with tiered_zero.gathered(weight, "
                "modify=True):`."
            )


def _check_params(specs: Mapping[nn.Parameter, ParamSpec], trains: bool) -> None:
    for param, spec in specs.items():
        handler = handler_of(param)
        if isinstance(handler, ClosedEngine):
            raise ModelError(
                f"Parameter {spec.name} has no value: it rested on a tier of an engine that is closed. Take "
                "engine.module.state_dict() before engine.close(), and call model.load_state_dict() with it before "
                "tiered_zero.initialize()."
            )
        if handler is not None:
            raise ModelError(
                f"Parameter {spec.name} belongs to an engine already, which is open. Use that engine, or close it "
                "first."
            )
        if spec.trainable and spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"Parameter {spec.name} is {spec.dtype}; trainable ones are float32, bfloat16 or float16. Convert it "
                "(model.float()), or set requires_grad=False for it."
            )
    if not trains:
        return
    if not any(spec.trainable for spec in specs.values()):
        raise ModelError(
            "No parameter of the model requires a gradient; there is nothing to train. Set requires_grad=True."
        )
    if not any(spec.trainable and spec.numel for spec in specs.values()):
        raise ModelError("Every parameter of the model that requires a gradient is empty; there is nothing to train.")


def compute_dtype(config: Config, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor has on the device: for a float, the config's 16-bit dtype if it sets one."""
    wanted: torch.dtype = getattr(torch, config.param_dtype_name)
    return wanted if dtype.is_floating_point and wanted != torch.float32 else dtype


def _limits(config: Config, model: nn.Module, machine: PlannedMachine, ranks: Collectives) -> Limits:
    """Return the bytes that this rank may use on the device and in host memory: the config's limit if it is set and not
    above the free bytes, else the free bytes minus an eighth."""
    settings = config.tiered_zero
    nbytes, source, given_nbytes = machine.device_nbytes, machine.sources[0], None
    if nbytes is None:
        # what the model's parameters take there is free too: they move to their planned places
        nbytes = available_device_nbytes(find_device(settings.device), model.parameters())
        source, given_nbytes = "what the device has free", settings.device_memory_limit
    limits = limit_of("device", nbytes, source, given_nbytes)
    nbytes, source, given_nbytes = machine.host_nbytes, machine.sources[1], None
    if nbytes is None:
        nbytes, source = available_host_nbytes(), "what this machine and its cgroup have free"
        given_nbytes = settings.host_memory_limit
    if machine.ranks > 1:
        nbytes, source = nbytes // machine.ranks, f"{source} for {machine.ranks} ranks"
    elif ranks.world_size > 1:
        # ranks of one host share its memory; every rank plans with the smallest share
        share = nbytes // local_world_size()
        nbytes = min(agree(ranks, "free host memory", lambda: share))
        source = "each rank's part of what its machine and cgroup have free"
    return limits | limit_of("host", nbytes, source, given_nbytes)


def planning_notices(run_spec: RunSpec) -> list[str]:
    """Return a line for each setting that the plan could not follow exactly."""
    return [
        *_params_notices(run_spec),
        *_update_notices(run_spec),
        *_memory_notices(run_spec),
        *_size_notices(run_spec),
        *_state_notices(run_spec),
    ]


def _params_notices(run_spec: RunSpec) -> Iterator[str]:
    zero = run_spec.config.zero_optimization
    if (moved := describe_resolved_tiers(run_spec.config, run_spec.effective_config)) is not None:
        yield moved
    if "stage3_param_persistence_threshold" in zero.model_fields_set and zero.stage3_param_persistence_threshold:
        key = "zero_optimization.stage3_param_persistence_threshold"
        if run_spec.plan.request.shards_params:
            yield f"{key}: no parameter stays whole with many ranks; small ones are gathered with their block"
        elif splits_masters_off_device(run_spec.effective_config):
            yield f"{key}: no parameter stays on the device with bf16_remainder, as each is half of its master"


def _update_notices(run_spec: RunSpec) -> Iterator[str]:
    config, plan, rule = run_spec.config, run_spec.plan, run_spec.rule
    request = plan.request
    if rule.elementwise and any(group.get("fused") for group in run_spec.source.param_groups):
        kept = f"state is kept as {request.state_format}"
        cause = "each rank has parts of parameters" if request.shards_params else kept
        yield f"{rule.name} with fused=True is stepped as with fused=False, which rounds otherwise, for {cause}"
    keys = ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor", "communication_data_type")
    defaults = type(config).model_fields
    idle = [key for key in keys if getattr(config, key) not in (defaults[key].default, False)]
    if idle and request.world_size == 1:
        yield f"one rank has no gradients to sum with others': without effect are {', '.join(idle)}"
    if config.tiered_zero.update == "overlapped" and request.shards_state and not request.shards_params:
        yield f"tiered_zero.update: overlapped was asked for; {plan.update_policy.text}"


def _memory_notices(run_spec: RunSpec) -> Iterator[str]:
    plan, (_, limit_source) = run_spec.plan, run_spec.plan.limits["host"]
    if run_spec.config.activations_device == "cpu" and plan.activations is None:
        yield (
            "activation_checkpointing.cpu_checkpointing, tiered_zero.activations.device cpu: without effect where the "
            "CPU computes, for activations rest in host memory there; tiered_zero.activations.device nvme frees it"
        )
    if plan.request.gradient_tier == "auto" and (nbytes := plan.nbytes("nvme", "gradient")):
        in_memory = plan.nbytes("host", "gradient") + plan.nbytes("device", "gradient")
        kept = plan.nbytes("host", "param") if plan.request.param_tier == "nvme" else 0
        also = f", where offload_param.max_in_cpu keeps {format_nbytes(kept)} of parameters" if kept else ""
        yield (
            f"tiered_zero.gradients: {format_nbytes(nbytes)} rest on nvme and {format_nbytes(in_memory)} in memory, "
            f"which has no room for more ({limit_source}){also}"
        )
    if plan.activations is not None and not plan.activations.nbytes:
        yield (
            f"tiered_zero.activations: the plan leaves no host memory for them ({limit_source}), so they "
            "stay on the device. Set tiered_zero.activations.limit, or offload more to nvme."
        )


def _size_notices(run_spec: RunSpec) -> Iterator[str]:
    zero, plan, numel = run_spec.config.zero_optimization, run_spec.plan, run_spec.sub_group_numel
    given, request = zero.sub_group_size, plan.request
    if numel < given < 1_000_000_000:  # DeepSpeed's default asks for nothing, here and below
        yield (
            f"zero_optimization.sub_group_size: {given} is a limit; sub-groups are cut at {numel} elements, the "
            f"automatic size (up to {MAX_SUB_GROUP_NUMEL} the value itself)"
        )
    elif numel > max(given, CUT_NUMEL):
        yield (
            f"zero_optimization.sub_group_size: {given} would cut this model into more than {MAX_SUB_GROUPS} pieces; "
            f"sub-groups are cut at {numel} elements"
        )
    if request.world_size > 1 and request.bucket_numel < zero.reduce_bucket_size != 500_000_000:
        yield (
            f"zero_optimization.reduce_bucket_size: {zero.reduce_bucket_size} is a limit; buckets have "
            f"{request.bucket_numel} elements"
        )
    paged = [placed.unit for placed in plan.tiers.units if not placed.is_resident]
    if not paged and run_spec.effective_config.zero_optimization.offload_param.device != "none":
        yield (
            "zero_optimization.offload_param has nothing to move: no parameter has more than "
            f"{zero.stage3_param_persistence_threshold} elements, and all stay on the device. Set "
            "zero_optimization.stage3_param_persistence_threshold to 0 to offload them."
        )
    allowed = zero.stage3_max_live_parameters
    needed = plan.pager_limits.live_nbytes // max((unit.itemsize for unit in paged), default=1)
    if paged and 0 < allowed < needed:  # 0 asks for just what is in use
        yield (
            f"zero_optimization.stage3_max_live_parameters: {allowed} is less than the {needed} elements that are in "
            "use at once; those are kept on the device. Lower tiered_zero.unit_size_cap to need fewer."
        )


def _state_notices(run_spec: RunSpec) -> Iterator[str]:
    plan = run_spec.plan
    asked = {f"tiered_zero.state_limits.{tier}": tier for tier in plan.request.state_limits}
    if run_spec.config.zero_optimization.offload_optimizer.ratio < 1:
        asked["zero_optimization.offload_optimizer.ratio"] = "device"
    slowest = max(map(TIERS.index, plan.tiers.state), default=0)
    smallest = format_nbytes(min((layout.nbytes for layout in run_spec.layouts), default=0))
    for name, tier in asked.items():
        if tier not in plan.tiers.state and TIERS.index(tier) < slowest:
            yield (
                f"{name}: no sub-group rests on tier {tier}, for the smallest needs {smallest}. Lower "
                "zero_optimization.sub_group_size, or give more room."
            )
