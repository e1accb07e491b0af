"""The models that benchmarks of a step train, and the memory of their processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import transformers

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 128},
    "gpt2-30m": {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 16384},
    "gpt2-124m": {},
    "gpt2-350m": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-1.3b": {"n_layer": 24, "n_embd": 2048, "n_head": 16},
}
"""Beside the defaults of transformers' GPT2Config, which are the 124M model's. Weights are random."""


def gpt2_config(name: str) -> transformers.GPT2Config:
    return transformers.GPT2Config(**MODELS[name])


def build_gpt2(config: transformers.GPT2Config) -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(config)


def resident_nbytes(name: str) -> int | None:
    """VmRSS or VmHWM (its peak) of this process; None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
