"""The configs of tests, in DeepSpeed's form: everything off the device unless a test says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.01}}


SMALL_DEVICE: dict[str, Any] = {"device_memory_limit": "1GiB"}
"""For `tiered_zero`: host memory is another one than the device's, which on the CPU has to be said."""


def zero_section(param: str, state: str, path: Path | str | None = None, **more: Any) -> dict[str, Any]:
    """Stage 3 with parameters and optimizer state on these tiers, and nothing that persists on the device.

    `path`: the swap directory. `more`: further keys, and values that replace those here."""
    nvme = {} if path is None else {"nvme_path": str(path)}
    return {
        "stage": 3,
        "offload_param": {"device": param, **nvme, "max_in_cpu": 0},
        "offload_optimizer": {"device": state, **nvme},
        "stage3_param_persistence_threshold": 0,
        **more,
    }


def config_of(zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Micro-batches of 4 without clipping, which may therefore update in backward. `more`: keys of the config."""
    section = {} if zero is None else {"zero_optimization": zero}
    runtime = {"tiered_zero": {**SMALL_DEVICE, **more.pop("tiered_zero", {})}}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, **section, **runtime, **more}
