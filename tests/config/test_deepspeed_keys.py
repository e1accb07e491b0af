"""One fate for each key; every fate kept."""

from typing import Any

import pytest

from tiered_zero.config.deepspeed_keys import OTHERS, Fate, Key, table
from tiered_zero.config.load import load
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError

KEYS = table(Config)

DEEPSPEED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
steps_per_print dump_state gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op
communication_data_type seq_parallel_communication_data_type disable_allgather sparse_gradients
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer bfloat16 torch_autocast amp wall_clock_breakdown
memory_breakdown dataloader_drop_last log_level vocabulary_size timers flops_profiler
comet comms_logger autotuning elasticity sparse_attention progressive_layer_drop eigenvalue quantize_training
compression_training curriculum_learning data_efficiency hybrid_engine pipeline tensor_parallel expert_parallel
use_data_before_expert_parallelism nebula datastates_ckpt weight_quantization compile graph_harvesting
sequence_parallel_size data_parallel_size
fp16: enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
min_loss_scale fp16_master_weights_and_grads
bf16: enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
data_types: grad_accum_dtype param_dtype buffer_dtype
csv_monitor: enabled output_path job_name
tensorboard: enabled output_path job_name
wandb: enabled group team project
aio: block_size queue_depth intra_op_parallelism thread_count num_threads single_submit overlap_events use_gds
optimizer: type params legacy_fusion
scheduler: type params
activation_checkpointing: partition_activations number_checkpoints contiguous_memory_optimization cpu_checkpointing
synchronize_checkpoint_boundary profile
checkpoint: tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer
zero_optimization: stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint zenflow
sub_group_size cpu_offload_param cpu_offload cpu_offload_use_pin_memory stage3_prefetch_bucket_size
prefetch_bucket_size stage3_param_persistence_threshold param_persistence_threshold
stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters max_live_parameters
stage3_max_reuse_distance max_reuse_distance stage3_gather_16bit_weights_on_model_save
gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
module_granularity_threshold stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
stage3_allgather_sequential allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients
zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
zeropp_loco_param mics_shard_size mics_hierarchical_params_gather memory_efficient_linear
pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
save_muon_momentum_buffer_in_memory leaf_module grad_hooks aio
zero_optimization.offload_param: device nvme_path buffer_count buffer_size max_in_cpu pin_memory
zero_optimization.offload_optimizer: device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init
ratio super_offload cpuadam_cores_perc
"""
"""Every key of DeepSpeed 0.19, as its code reads them: a word ending in a colon opens a section."""


def deepspeed_paths() -> list[str]:
    paths, section = [], ""
    for word in DEEPSPEED.split():
        if word.endswith(":"):
            section = word[:-1] + "."
        else:
            paths.append(section + word)
    return paths


def config_with(path: str, value: Any, **others: Any) -> Config:
    tree: dict[str, Any] = {"train_batch_size": 8}
    *sections, name = path.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node.update(others, **{name: value})
    if "optimizer" in tree:
        tree["optimizer"]["type"] = "AdamW"
    return load(tree)


def of(fate: Fate) -> list[Any]:
    return [pytest.param(key, id=key.path) for key in OTHERS if key.fate is fate]


@pytest.mark.parametrize("path", deepspeed_paths())
def test_every_deepspeed_key_has_a_fate(path: str) -> None:
    assert path in KEYS


def test_every_fate_has_its_reason() -> None:
    for key in KEYS.values():
        assert key.why, key.path
        assert (key.fate is Fate.RENAMED) == bool(key.to)
        if key.to:
            assert key.to in KEYS or any(path.startswith(f"{key.to}.") for path in KEYS)


@pytest.mark.parametrize("key", of(Fate.NO_EFFECT))
def test_no_effect_is_reported(key: Key) -> None:
    other = {bool: not key.default, float: 7, int: 7, str: "x", dict: {"enabled": True}}.get(type(key.default), 7)
    config = config_with(key.path, other)
    row = next(row for row in config.explain() if row.path == key.path)
    assert (row.fate, row.value, row.effect) == (Fate.NO_EFFECT, other, key.why)
    assert any("without effect" in line and key.path in line for line in config.notices) != key.quiet
    plain = load(
        {"train_batch_size": 8, **({"optimizer": {"type": "AdamW"}} if key.path.startswith("optimizer.") else {})}
    )
    assert config.model_dump(exclude={"optimizer": {"params"}}) == plain.model_dump(exclude={"optimizer": {"params"}})


@pytest.mark.parametrize("key", of(Fate.NO_EFFECT))
def test_a_default_says_nothing(key: Key) -> None:
    assert not any("without effect" in line for line in config_with(key.path, key.default).notices)


NEUTRAL: dict[str, list[Any]] = {
    "optimizer.params.fp32_optimizer_states": [True, 1, "true"],
    "data_types.grad_accum_dtype": ["fp32", "float32"],
    "sequence_parallel_size": [1],
    "zero_optimization.mics_shard_size": [-1, 0],
    "zero_optimization.zeropp_loco_param": [False, 0, "false", {}],
}
"""The values at which DeepSpeed does what is done here, where those are not `false` or a section that is off."""

ON_WITHOUT_A_WORD = ("compression_training", "quantize_training", "weight_quantization")
"""Sections that do something in DeepSpeed without saying `enabled`."""

OFF: Any = {"enabled": False, "inner": {"enabled": True}}
VALUES: list[Any] = [
    False,
    True,
    0,
    1,
    -1,
    2,
    0.5,
    "mean",
    "sum",
    "max",
    "fp32",
    "float32",
    "bf16",
    "true",
    "false",
    {},
]
VALUES += [[], [1], OFF, {"enabled": True}, {"enabled": 1}, {"inner": 1}]


def asks(key: Key, value: Any) -> bool:
    section = isinstance(key.default, dict)
    neutral = NEUTRAL.get(key.path, [False, 0, "false", {}, OFF] if section else [False, 0, "false"])
    if section and key.path not in ON_WITHOUT_A_WORD:
        neutral = [*neutral, {"inner": 1}]
    return (type(value), value) not in [(type(one), one) for one in neutral]


@pytest.mark.parametrize("key", of(Fate.REFUSED))
def test_each_value_of_a_refused_key(key: Key) -> None:
    section = key.path.rpartition(".")[0]
    others = {"enabled": True} if section in ("fp16", "bf16") else {}
    for value in (None, "auto", *VALUES):
        if value in (None, "auto") or not asks(key, value):
            config = config_with(key.path, value, **others)
            assert not any("without effect" in line for line in config.notices)
            row = next(row for row in config.explain() if row.path == key.path)
            assert "refused" in row.effect and key.why in row.effect
            continue
        with pytest.raises(ConfigError) as caught:
            config_with(key.path, value, **others)
        assert str(caught.value).startswith(f"{key.path}: expected") and key.why in str(caught.value)
        if others:  # in a section that is off DeepSpeed reads it and goes on
            assert config_with(key.path, value).param_dtype_name == "float32"


@pytest.mark.parametrize("value", [True, 1, 0, "true", "false"])
def test_a_switch_may_be_a_number(value: Any) -> None:
    config_with("zero_allow_untested_optimizer", value)


@pytest.mark.parametrize("section", ["fp16", "bf16"])
@pytest.mark.parametrize("off", [{}, {"enabled": False}, {"enabled": "auto"}, {"enabled": 0}])
def test_a_section_that_is_off_may_hold_anything(section: str, off: Any) -> None:
    unfit = {"loss_scale_window": 0, "hysteresis": 0, "initial_scale_power": 999}
    unfit = unfit if section == "fp16" else {"check_grad_overflow": 3}
    assert load({"train_batch_size": 8, section: {**off, **unfit}}).param_dtype_name == "float32"


def test_an_offload_that_is_off_may_hold_anything() -> None:
    param = {"device": "none", "buffer_count": 0, "buffer_size": 0, "nvme_path": None}
    offload = config_with("zero_optimization.offload_param", param).zero_optimization.offload_param
    assert (offload.buffer_count, offload.buffer_size) == (5, 100_000_000)
    with pytest.raises(ConfigError, match="buffer_count"):
        config_with("zero_optimization.offload_param", {**param, "device": "cpu"}, stage=3)


@pytest.mark.parametrize("key", of(Fate.RENAMED))
def test_renamed_reaches_its_target(key: Key) -> None:
    value: Any = (
        True if "cpu_offload" in key.path or isinstance(getattr(KEYS.get(key.to), "default", None), bool) else 64
    )
    if key.to in ("aio", "bf16"):
        value = {"queue_depth": 64} if key.to == "aio" else {"enabled": True}
    zero = {"stage": 3} if key.path.startswith("zero_optimization.") else {}
    config = config_with(key.path, value, **zero)
    reports = [row for row in config.explain() if row.source == "renamed"]
    assert reports and all(row.path == key.to or row.path.startswith(f"{key.to}.") for row in reports)
    assert all(f"written as {key.path}" in row.effect for row in reports)
    assert any(key.path in line for line in config.notices if "another name" in line) != key.quiet


def test_sections_without_enabled() -> None:
    with pytest.raises(ConfigError, match="compression_training"):
        config_with("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": True}}})
    config_with("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": False}}})
    with pytest.raises(ConfigError, match="zenflow"):
        config_with("zero_optimization.zenflow", {"topk_ratio": 0.1})
