"""The DeepSpeed JSONs that axolotl, LLaMA-Factory and Accelerate ship: keys and values, and what fills their "auto".

Each is its trainer's common part and what sets it apart; `None` takes a key out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

Json = dict[str, Any]

AUTO = "auto"
BATCH = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO)
CPU: Json = {"device": "cpu", "pin_memory": True}
FP16: Json = {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
STAGE3: Json = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": AUTO} | {
    f"stage3_{name}": AUTO for name in ("prefetch_bucket_size", "param_persistence_threshold")
}
BARE3 = {name.removeprefix("stage3_"): value for name, value in STAGE3.items()}
GATHER = "gather_16bit_weights_on_model_save"

# axolotl: deepspeed_configs/*.json

_AXOLOTL: Json = {
    **BATCH,
    "gradient_clipping": AUTO,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": AUTO},
    "fp16": {**FP16, "auto_cast": False, "initial_scale_power": 32},
}
_NO_LIMIT: Json = {"sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0, GATHER: True}
_COMPILE: Json = {"compile": {"disable": False, "backend": "inductor"}}
_BF16: Json = {"bf16": {"enabled": True}, "fp16": None}
_TORCH_OPTIMIZER: Json = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
_ZERO1: Json = {"stage": 1, "overlap_comm": True}
_ZERO2: Json = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
_ZERO3: Json = {"stage": 3, **STAGE3, **_NO_LIMIT}
_ADAMW: Json = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)}
AXOLOTL: dict[str, Json] = {
    "zero1": {"zero_optimization": _ZERO1, "optimizer": _ADAMW, "gradient_clipping": None},
    "zero1_torch_compile": {"zero_optimization": _ZERO1, **_COMPILE},
    "zero2": {"zero_optimization": _ZERO2},
    "zero2_torch_compile": {"zero_optimization": _ZERO2, **_COMPILE},
    "zero3": {
        "zero_optimization": {
            **{"stage": 3, **STAGE3, "sub_group_size": 0, f"stage3_{GATHER}": True},
            **{"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
        }
    },
    "zero3_bf16": {"zero_optimization": {"stage": 3, **BARE3, **_NO_LIMIT}, **_BF16},
    "zero3_bf16_cpuoffload_all": {
        "zero_optimization": {**_ZERO3, "offload_optimizer": CPU, "offload_param": CPU},
        **_BF16,
        **_TORCH_OPTIMIZER,
    },
    "zero3_bf16_cpuoffload_params": {
        "zero_optimization": {**_ZERO3, "offload_param": CPU},
        **_BF16,
        **_TORCH_OPTIMIZER,
    },
}

# LLaMA-Factory: examples/deepspeed/ds_*_config.json

_FACTORY: Json = {
    **BATCH,
    "gradient_clipping": AUTO,
    "zero_allow_untested_optimizer": True,
    "fp16": {**FP16, "initial_scale_power": 16},
    "bf16": {"enabled": AUTO},
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
}
_BUCKETS: Json = {
    **{"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_scatter": True},
    **{"reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True},
}
_LARGE: Json = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_FACTORY3: Json = {"stage": 3, **STAGE3, **_LARGE, "overlap_comm": False, f"stage3_{GATHER}": True}
LLAMA_FACTORY: dict[str, Json] = {
    "z0": {"zero_optimization": {"stage": 0, **_BUCKETS}},
    "z2": {"zero_optimization": {"stage": 2, **_BUCKETS}},
    "z2_autotp": {
        "_comment": "a list of the models that it is for",
        "zero_optimization": {"stage": 2, **_BUCKETS},
        "tensor_parallel": {"autotp_size": 2},
        "comms_config": None,
        "monitor_config": None,
    },
    "z2_offload": {"zero_optimization": {"stage": 2, "offload_optimizer": CPU, **_BUCKETS}},
    "z3": {"zero_optimization": _FACTORY3},
    "z3_fp8": {
        "train_batch_size": None,
        "fp16": {**FP16, "enabled": False, "initial_scale_power": 16},
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": {
            **{**_FACTORY3, "sub_group_size": 10**9, "offload_optimizer": {**CPU, "pin_memory": False}},
            **{"reduce_bucket_size": 12845056, "stage3_prefetch_bucket_size": 11560550},
            "stage3_param_persistence_threshold": 35840,
        },
        "steps_per_print": 10000000,
    },
    "z3_offload": {"zero_optimization": {**_FACTORY3, "offload_optimizer": CPU, "offload_param": CPU}},
}

# Accelerate: examples/deepspeed_config_templates/zero_stage*.json, tests/deepspeed/ds_config_*.json

_ADAMW_OF_TORCH: Json = {
    "type": "AdamW",
    "params": {"lr": AUTO, "weight_decay": AUTO, "torch_adam": True, "adam_w_mode": True},
}
_WARMUP = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)
_ACCELERATE: Json = {
    **BATCH,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
_TEMPLATE: Json = {
    "fp16": {**FP16, "enabled": True, "initial_scale_power": 16},
    "optimizer": _ADAMW_OF_TORCH,
    "scheduler": {"type": "WarmupDecayLR", "params": {**_WARMUP, "total_num_steps": AUTO}},
}
_TEMPLATE3: Json = {**_TEMPLATE, "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}}}
_TEST: Json = {"fp16": {**FP16, "initial_scale_power": 16}, "bf16": {"enabled": AUTO}}
_TRAINS: Json = {"optimizer": _ADAMW_OF_TORCH, "scheduler": {"type": "WarmupLR", "params": _WARMUP}}
_BUCKETS_AUTO: Json = {
    **{"allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True},
    **{"reduce_bucket_size": AUTO, "contiguous_gradients": True},
}
_ACCELERATE3: Json = {"stage": 3, **STAGE3, **_LARGE, f"stage3_{GATHER}": AUTO}
_CPU_AND_PATH: Json = {**CPU, "nvme_path": "/nvme"}
ACCELERATE: dict[str, Json] = {
    "template_1": {**_TEMPLATE, "zero_optimization": {"stage": 1, **_BUCKETS_AUTO}},
    "template_2": {**_TEMPLATE, "zero_optimization": {"stage": 2, **_BUCKETS_AUTO}},
    "template_2_offload": {**_TEMPLATE, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **_BUCKETS_AUTO}},
    "template_3": {**_TEMPLATE3, "zero_optimization": _ACCELERATE3},
    "template_3_offload": {
        **_TEMPLATE3,
        "zero_optimization": {**_ACCELERATE3, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "test_2": {**_TEST, **_TRAINS, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **_BUCKETS_AUTO}},
    "test_2_model_only": {**_TEST, "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **_BUCKETS_AUTO}},
    "test_3": {
        **{**_TEST, **_TRAINS},
        "zero_optimization": {**_ACCELERATE3, "offload_optimizer": _CPU_AND_PATH, "offload_param": _CPU_AND_PATH},
    },
    "test_3_model_only": {
        **dict.fromkeys(_ACCELERATE),
        **_TEST,
        "train_batch_size": 1,
        "zero_optimization": {**_ACCELERATE3, "offload_optimizer": CPU, "offload_param": CPU},
    },
}

SHIPPED: dict[str, Json] = {
    f"{trainer}-{name}": {key: value for key, value in {**common, **own}.items() if value is not None}
    for trainer, common, configs in (
        ("axolotl", _AXOLOTL, AXOLOTL),
        ("llama_factory", _FACTORY, LLAMA_FACTORY),
        ("accelerate", _ACCELERATE, ACCELERATE),
    )
    for name, own in configs.items()
}

_HIDDEN = 16
_FILLED: Json = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-2,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 1e-2,
    "scheduler.params.warmup_num_steps": 2,
    "scheduler.params.total_num_steps": 10,
    "fp16.enabled": False,
    "zero_optimization.reduce_bucket_size": _HIDDEN * _HIDDEN,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * _HIDDEN * _HIDDEN),
    "zero_optimization.stage3_param_persistence_threshold": 10 * _HIDDEN,
    f"zero_optimization.stage3_{GATHER}": False,
}


def filled(config: Mapping[str, Any]) -> Json:
    """Fill "auto" as transformers' and Accelerate's trainers do, from arguments of a training in bf16, or in fp16 where
    the config says so."""
    result = deepcopy(dict(config))
    half = result.get("fp16", {}).get("enabled") is True
    values = {**_FILLED, "bf16.enabled": not half}
    if "train_batch_size" in result and result.get("gradient_accumulation_steps") != AUTO:
        values["train_batch_size"] = 2
    for node, name, path in list(_autos(result, "")):
        if path in values:
            node[name] = values[path]
    return result


def _autos(node: Json, prefix: str) -> Iterator[tuple[Json, str, str]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{name}.")
        elif value == AUTO:
            yield node, name, prefix + name
