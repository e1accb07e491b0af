"""Define the fate of each config key (honoured, renamed, no effect, refused) in one table, `table(Config)`. Report the
fates of the keys in a given config.

Honoured keys are the fields of the schema. All other keys of DeepSpeed 0.19 are listed here.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel

from tiered_zero.config.section import switch


class Fate(str, Enum):
    """What becomes of a config key: it is honoured, read under another name, without effect, or refused."""

    HONOURED = "honoured"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A config key, and what becomes of it (`fate`). `why`: the effect of an honoured key, or the reason for another
    fate. `default`: DeepSpeed's value if the key is absent. `to`: the new path of a renamed key. `quiet`: whether no
    notice is logged. `allowed`: the values that a refused key may have, besides None and "auto"."""

    path: str
    fate: Fate
    why: str
    default: Any = None
    to: str = ""
    quiet: bool = False
    allowed: tuple[Any, ...] = (False,)


OPTIMIZER_ARGUMENTS = tuple(
    "lr betas eps weight_decay momentum amsgrad nesterov adam_w_mode torch_adam bias_correction".split()
)
OTHER_WORDS: Mapping[str, str] = {
    "learning_rate": "lr",
    "beta": "betas",
    "epsilon": "eps",
    "decay": "weight_decay",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "grad_clip": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "max_norm": "gradient_clipping",
}
"""Common wrong name of a key -> its right name, for suggestions in errors."""

OPTIMIZERS: Mapping[str, str] = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "lion": "Lion", "sgd": "SGD"}
"""Optimizer type in lower case -> its spelling in messages. Other types are classes of torch.optim."""


def runs_as_adamw(name: str, adam_w_mode: bool) -> bool:
    """Return whether the optimizer `name` ("adam" or "adamw") runs as AdamW, as in DeepSpeed."""
    return name == "adamw" or adam_w_mode


_COMPRESSED = "it compresses gradients between ranks, and another optimizer in its place would change the numbers"
_MUP = "it needs the mup package and a model built with it; pass your own optimizer to initialize(optimizer=...)"
REFUSED_OPTIMIZERS: Mapping[str, str] = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "lamb": "torch.optim has no LAMB; pass an instance of one to initialize(optimizer=...)",
    "muon": (
        "DeepSpeed's Muon steps marked matrices with Muon and the rest with Adam, which torch's does not; pass "
        "torch.optim.Muon over your matrices to initialize(optimizer=...)"
    ),
}

_ONE_RANK = "one rank has nothing to gather or to reduce; of many, units and reduce_bucket_size decide"
_MONITOR = "csv_monitor, tensorboard, wandb, engine.step_report and tiered_zero.report have the numbers"
_PARALLEL = "every rank takes a part of the batch; no module is split over ranks"
_MOVES = "units, the recorded order and stage3_max_live_parameters decide when parameters move"
_CHECKPOINT = "checkpoints are written by every rank, in their own format"
_DS_ONLY = "steers a part of DeepSpeed that does not exist here"
_REPLACES = (
    "the engine steps the optimizer that it gets. Accelerate reads the key: unless it is false, it puts Adam in the "
    "place of other optimizers where state is offloaded, which is refused"
)
_STATES = "tiered_zero.state_format says how master weights and optimizer state are kept"


def _no_effect(section: str, why: str, *, quiet: bool = False, **defaults: Any) -> list[Key]:
    return [
        Key(path=section + name, fate=Fate.NO_EFFECT, why=why, default=default, quiet=quiet)
        for name, default in defaults.items()
    ]


def _satisfied(section: str, why: str, **defaults: Any) -> list[Key]:
    """Return a `Key` without effect for each name in `defaults`. No notice is logged, because this package always does
    what these keys ask for. `section`: the section's path, with a dot at its end. `defaults`: name -> DeepSpeed's
    value."""
    return _no_effect(section, why, quiet=True, **defaults)


def _refused(path: str, why: str, *allowed: Any) -> Key:
    """Return the `Key` of a refused key. `allowed`: the values that are accepted besides null and "auto"; if none are
    given, only false."""
    return Key(path=path, fate=Fate.REFUSED, why=why, allowed=allowed or (False,))


def _refused_sections(why: str, *names: str, on: bool = False) -> list[Key]:
    """Return a refused key for each section in `names`. A section is refused if its `enabled` is true. `on`: also
    refuse a section without `enabled`, unless all of its values are off (false, null, 0 or empty)."""
    return [Key(path=name, fate=Fate.REFUSED, why=why, default={} if on else {"enabled": False}) for name in names]


def _bare(*names: str) -> list[Key]:
    """Return a renamed key for each name: zero_optimization.NAME is read as zero_optimization.stage3_NAME."""
    prefix = "zero_optimization."
    return [
        Key(path=prefix + n, fate=Fate.RENAMED, why="bare name", to=f"{prefix}stage3_{n}", quiet=True) for n in names
    ]


def _old(path: str, to: str, why: str = "old name") -> Key:
    return Key(path=path, fate=Fate.RENAMED, why=why, to=to)


OTHERS: tuple[Key, ...] = (
    # Renamed. A section is renamed before the keys inside it.
    _old("bfloat16", "bf16"),
    _old("zero_optimization.aio", "aio", "the section belongs to the top level"),
    _old("aio.thread_count", "aio.intra_op_parallelism", "DeepSpeed documents this name and ignores it"),
    _old("aio.num_threads", "aio.intra_op_parallelism", "ds_nvme_tune prints this name and DeepSpeed ignores it"),
    _old("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer", "deprecated for offload_optimizer"),
    _old("zero_optimization.cpu_offload_param", "zero_optimization.offload_param", "deprecated for offload_param"),
    _old(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    *_bare("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *_bare("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *_bare("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
    # Top level, without effect.
    *_no_effect("", _ONE_RANK, disable_allgather=False, sparse_gradients=False),
    *_no_effect("", _ONE_RANK, seq_parallel_communication_data_type="fp32", seq_parallel_comm_data_type="fp32"),
    *_no_effect("", _ONE_RANK, allgather_size=None, comms_logger={}),
    *_no_effect("", "DeepSpeed reads no section of this name", comms_config={}, monitor_config={}),
    *_satisfied("", "any torch optimizer is accepted", zero_allow_untested_optimizer=False),
    *_satisfied("", _REPLACES, zero_force_ds_cpu_optimizer=True),
    *_no_effect("", _MONITOR, flops_profiler={}, comet={}, timers={}),
    *_no_effect("", "engine.memory_report() and the plan have the bytes", memory_breakdown=False),
    *_no_effect("", "tiered-zero explain prints the config", dump_state=False),
    *_no_effect("", "set the level of the logger 'tiered_zero'", log_level=None),
    *_no_effect("", _PARALLEL, pipeline={}, tensor_parallel={}, expert_parallel={}, data_parallel_size=None),
    *_no_effect("", _PARALLEL, use_data_before_expert_parallelism=False),
    *_no_effect("", "only a launcher reads it", autotuning={}),
    *_no_effect("", "only a model that asks for it reads it", sparse_attention={}, eigenvalue={}, vocabulary_size=None),
    *_no_effect("", "compile the model's blocks with torch.compile", compile={}, graph_harvesting=False),
    *_no_effect("", _CHECKPOINT, nebula={}, datastates_ckpt=None),
    *_satisfied("checkpoint.", "every checkpoint loads on any layout", load_universal=False),
    *_no_effect("checkpoint.", _CHECKPOINT, use_node_local_storage=False),
    *_no_effect("checkpoint.", _CHECKPOINT, parallel_write={}, checkpoint_serialization=True, writer={}),
    *_no_effect(
        "activation_checkpointing.",
        "an engine knows no ranks that hold the same activations; tiered_zero.activations moves them off the device",
        partition_activations=False,
    ),
    *_no_effect(
        "activation_checkpointing.",
        "torch.profiler and tiered_zero.trace time a step",
        synchronize_checkpoint_boundary=False,
        profile=False,
    ),
    *_satisfied(
        "activation_checkpointing.",
        "offloaded activations rest in one preallocated piece of memory in any case",
        contiguous_memory_optimization=False,
    ),
    *_satisfied(
        "activation_checkpointing.",
        "that piece is sized in bytes: tiered_zero.activations.limit",
        number_checkpoints=None,
    ),
    *_no_effect("aio.", "requests are submitted as soon as a worker is free", single_submit=False, overlap_events=True),
    *_no_effect("aio.", "transfers pass through host memory", use_gds=False),
    *_no_effect("optimizer.", _DS_ONLY, legacy_fusion=False),
    # Precision sections, without effect.
    *_no_effect("fp16.", _DS_ONLY, fused_mode=True),
    *_no_effect("bf16.", "gradients leave the device as they arrive", immediate_grad_update=False),
    # zero_optimization, without effect.
    *_no_effect("zero_optimization.", "gradients of a unit always rest in one flat", contiguous_gradients=True),
    *_no_effect(
        "zero_optimization.", "many ranks always reduce-scatter; stage 0 gathers the sums", reduce_scatter=True
    ),
    *_no_effect("zero_optimization.", _ONE_RANK, use_multi_rank_bucket_allreduce=True, allgather_partitions=True),
    *_satisfied(
        "zero_optimization.",
        "a gather writes each shard straight to its place, and takes no bucket",
        allgather_bucket_size=500_000_000,
    ),
    *_satisfied(
        "zero_optimization.", "every rank copies its own shard of every unit in any case", round_robin_gradients=False
    ),
    *_no_effect("zero_optimization.", _ONE_RANK, zero_hpz_partition_size=1),
    *_no_effect("zero_optimization.", _ONE_RANK, mics_hierarchical_params_gather=False),
    *_no_effect("zero_optimization.", _ONE_RANK, stage3_use_all_reduce_for_fetch_params=False),
    *_no_effect("zero_optimization.", _ONE_RANK, stage3_allgather_sequential=False),
    *_no_effect("zero_optimization.", _MOVES, log_trace_cache_warnings=False),
    *_no_effect("zero_optimization.", "tiered_zero.unit_size_cap decides", stage3_module_granularity_threshold=0),
    *_no_effect("zero_optimization.", "modules of any kind are paged, without a list", leaf_module={}),
    *_satisfied(
        "zero_optimization.",
        "state_dict() always gives whole weights",
        stage3_gather_16bit_weights_on_model_save=False,
    ),
    *_no_effect("zero_optimization.", _CHECKPOINT, load_from_fp32_weights=True, elastic_checkpoint=False),
    *_no_effect("zero_optimization.", _CHECKPOINT, pipeline_loading_checkpoint=False),
    *_no_effect("zero_optimization.", "an unused parameter is left alone, as in torch", ignore_unused_parameters=True),
    *_no_effect("zero_optimization.", _DS_ONLY, memory_efficient_linear=True, override_module_apply=True),
    *_no_effect("zero_optimization.", _DS_ONLY, grad_hooks=True, save_muon_momentum_buffer_in_memory=False),
    *_satisfied("zero_optimization.", "checks are always on", enable_sanity_checks=False),
    *_no_effect("zero_optimization.", "set pin_memory in offload_optimizer", cpu_offload_use_pin_memory=None),
    *_satisfied(
        "zero_optimization.offload_optimizer.",
        "buffer_count decides how far reads run ahead and writes behind",
        pipeline_read=False,
        pipeline_write=False,
    ),
    *_satisfied("zero_optimization.offload_optimizer.", "state is initialized in its place", fast_init=False),
    *_no_effect("zero_optimization.offload_optimizer.", "threads follow affinity and cgroup", cpuadam_cores_perc=0.8),
    # Refused: ignoring these would change numbers.
    *_refused_sections("apex mixed precision is not here; use bf16 or fp16", "amp"),
    *_refused_sections(
        "use bf16 or fp16, or put torch.autocast into the model's forward: it keeps 2 bytes a parameter, in no plan, "
        "except in torch.utils.checkpoint(use_reentrant=True)",
        "torch_autocast",
    ),
    *_refused_sections("it quantizes and prunes the model in training", "compression_training", on=True),
    *_refused_sections("it quantizes the model", "quantize_training", "weight_quantization", on=True),
    *_refused_sections("it drops layers in training", "progressive_layer_drop"),
    *_refused_sections("it changes the order and the length of the data", "curriculum_learning", "data_efficiency"),
    *_refused_sections("it replaces modules for generation", "hybrid_engine"),
    *_refused_sections("it would choose the batch size; write the batch size instead", "elasticity"),
    _refused("sequence_parallel_size", "the batch would be split over ranks; leave it out", 1),
    _refused("data_types.grad_accum_dtype", "gradients are summed in fp32; write fp32", "fp32", "float32"),
    _refused("data_types.param_dtype", "bf16.enabled or fp16.enabled say it"),
    _refused("data_types.buffer_dtype", "buffers keep their dtype"),
    _refused("fp16.fp16_master_weights_and_grads", _STATES),
    _refused("bf16.bf16_master_weights_and_grads", _STATES),
    _refused("bf16.bf16_optimizer_states", _STATES),
    _refused("zero_optimization.legacy_stage1", "removed from DeepSpeed too; leave it out"),
    _refused("zero_optimization.zero_quantized_weights", "it quantizes weights on their way"),
    _refused("zero_optimization.zero_quantized_nontrainable_weights", "it quantizes weights on their way"),
    _refused("zero_optimization.zero_quantized_gradients", "it quantizes gradients on their way"),
    _refused("zero_optimization.zeropp_loco_param", "it corrects quantized gradients, which are not here", False, {}),
    _refused("zero_optimization.mics_shard_size", "units are sharded over all ranks; leave it out", -1, 0),
    _refused("zero_optimization.zenflow", "it updates some gradients late; leave it out"),
    _refused("zero_optimization.offload_optimizer.super_offload", "its roll-back changes numbers; leave it out"),
    _refused("optimizer.params.max_grad_norm", "DeepSpeed refuses it too; set gradient_clipping at the top level"),
    _refused("optimizer.params.fp32_optimizer_states", _STATES, True),
)


@functools.cache
def table(schema: type[BaseModel]) -> Mapping[str, Key]:
    """Return path -> key for all known keys: first the schema's, then OTHERS."""
    keys = [*_honoured(schema, ""), *OTHERS]
    result = {key.path: key for key in keys}
    assert len(result) == len(keys), "a key has two fates"
    return types.MappingProxyType(result)


def _honoured(schema: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, info in schema.model_fields.items():
        kinds = (info.annotation, *typing.get_args(info.annotation))  # Section, or Section | None
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if section is not None:
            yield from _honoured(section, f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True)
            yield Key(
                path=prefix + (info.alias or name), fate=Fate.HONOURED, why=info.description or "", default=default
            )


def asks_for_something(key: Key, value: Any) -> bool:
    """Return whether `value` would do something in DeepSpeed. `key`: a key that is refused or without effect."""
    if value is None or value == "auto":
        return False
    if isinstance(value, dict) and isinstance(key.default, dict):
        return _switched_on({**key.default, **value})
    harmless = key.allowed if key.fate is Fate.REFUSED else (key.default,)
    if any(isinstance(ok, bool) for ok in harmless):
        value = switch(value)
    return not any(isinstance(value, bool) == isinstance(ok, bool) and value == ok for ok in harmless)


def _switched_on(section: Mapping[str, Any]) -> bool:
    """Return whether a section is on. Its key `enabled` decides. Without this key, the section is off if every value is
    false, null, "auto", zero, empty, or a section that is off."""
    off = (False, None, "auto", "false")
    if "enabled" in section:
        return section["enabled"] not in off and bool(section["enabled"])
    return any(
        _switched_on(value) if isinstance(value, dict) else value not in off and bool(value)
        for value in section.values()
    )


Source = Literal["file", "default", "auto", "derived", "renamed"]
FILLED = "the trainer that reads the file fills it: Transformers, Accelerate, Lightning"


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """One line of `tiered-zero explain`: a key, its value, where the value comes from, whether the key is used
    (`Fate`), and its effect."""

    path: str
    value: Any
    source: Source
    fate: Fate
    effect: str


@dataclass(kw_only=True)
class Reading:
    """Collects what the loader finds out about the keys of a file. `reports` and `notices` read it."""

    auto: dict[str, Any] = field(default_factory=dict)
    """Path of a key that is "auto" in the file -> the value that the key got."""
    derived: set[str] = field(default_factory=set)
    """Names of the batch sizes that the loader has computed from the others."""
    unfilled: set[str] = field(default_factory=set)
    """Paths of keys that are "auto" and have no default: a trainer, such as Accelerate, fills them before a run."""
    idle: list[tuple[Key, Any]] = field(default_factory=list)
    """Keys in the file that do nothing, with their values."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Path under which a key is read -> its path as the file writes it."""
    notices: list[str] = field(default_factory=list)
    """Further lines to log, such as values that were rounded."""

    def written_as(self, path: str) -> str:
        """Return the old name that the file uses for the key `path`, or for a section that contains it; "" if none."""
        return next((old for new, old in self.renamed.items() if path == new or path.startswith(f"{new}.")), "")


def reports(config: BaseModel, reading: Reading) -> list[KeyReport]:
    """Return a report for every honoured key, then one for every key of the file that has no effect."""
    rows = [_report(key, value, given, reading) for key, value, given in _honoured_values(config, reading, "")]
    for key, value in reading.idle:
        what = "switched off; on, it" if False in key.allowed else "any other value"
        why = f"{what} is refused: {key.why}" if key.fate is Fate.REFUSED else key.why
        rows.append(_report(replace(key, fate=Fate.NO_EFFECT, why=why), value, True, reading))
    return rows


def notices(reading: Reading, keys: Mapping[str, Key]) -> tuple[str, ...]:
    """Return the lines to log once at start. One line each lists renamed keys, "auto" keys that got a value, "auto"
    keys that a trainer fills, and keys without effect. `reading.notices` follow."""
    renamed = [f"{old} -> {new}" for new, old in reading.renamed.items() if not keys[old].quiet]
    resolved = [f"{path} = {value}" for path, value in reading.auto.items() if path not in reading.unfilled]
    idle = [key.path for key, value in reading.idle if not key.quiet and asks_for_something(key, value)]
    lines = []
    if renamed:
        lines.append(f"config: read under another name: {', '.join(renamed)}")
    if resolved:
        lines.append(f'config: "auto" resolved: {", ".join(resolved)}')
    if reading.unfilled:
        lines.append(
            f'config: "auto" is left to the trainer that reads the file: {", ".join(sorted(reading.unfilled))}'
        )
    if idle:
        lines.append(f"config: accepted without effect (tiered-zero explain says why): {', '.join(idle)}")
    return (*lines, *(f"config: {line}" for line in reading.notices))


def _honoured_values(node: BaseModel, reading: Reading, prefix: str) -> Iterator[tuple[Key, Any, bool]]:
    """Yield each honoured key, its value, and whether the file has it. `node`: the config, or its section `prefix`."""
    for name, field_info in type(node).model_fields.items():
        value, path = getattr(node, name), prefix + (field_info.alias or name)
        key = Key(path=path, fate=Fate.HONOURED, why=field_info.description or "")
        if isinstance(value, BaseModel):
            yield from _honoured_values(value, reading, f"{path}.")
        elif isinstance(value, dict):
            arguments = {f"{path}.{argument}": given for argument, given in value.items()}
            arguments |= {auto: given for auto, given in reading.auto.items() if auto.startswith(f"{path}.")}
            yield from ((replace(key, path=argument), given, True) for argument, given in arguments.items())
        elif field_info.description:  # a section that the file leaves out has none
            yield key, value, name in node.model_fields_set


def _report(key: Key, value: Any, given: bool, reading: Reading) -> KeyReport:
    """Return the report on a key. `given`: whether the file has the key."""
    path, effect = key.path, key.why
    is_auto = path in reading.auto
    written_as = reading.written_as(path) if given or is_auto else ""
    source: Source = "renamed" if written_as else "file" if given else "default"
    if is_auto or path in reading.derived:
        source = "auto" if is_auto else "derived"
    if path in reading.unfilled:
        value, effect = "auto", f"{effect} ({FILLED})"
    if written_as:
        effect = f"{effect} (written as {written_as})"
    return KeyReport(path=path, value=value, source=source, fate=key.fate, effect=effect)
