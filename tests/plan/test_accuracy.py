"""The plan against real runs: the ledger after two steps, kind by kind, and the swap files on the disk."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.configs import SMALL_DEVICE
from tests.support.inspection.insides import DATA_NAME, PREFIX
from tests.support.models import LENGTH, VOCAB, ParityGPT
from tests.support.pairwise import by_turns
from tests.support.trainers import FAR
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.plan.planner import Plan
from tiered_zero.sizes import PAGE_NBYTES

DEVICES = ("none", "cpu", "nvme")
TIMED = ("device", "gradient_in_flight")
"""How many gradients are on their way at once is a matter of luck; the plan has the most that may be."""

MODES = [("overlapped", 1), ("overlapped", 2), ("delayed", 1), ("barrier", 1)]
CASES = [
    (*places, mode)
    for places, mode in by_turns([*itertools.product(DEVICES, DEVICES)], MODES, 2)
    if not (places[1] == "none" and mode[0] == "delayed")
]


MODELS = ("gpt", "parity")
"""The second with frozen, tied and unused parameters."""


def build(name: str) -> nn.Module:
    return ParityGPT() if name == "parity" else build_gpt(GPTConfig(layers=4, hidden=128, vocab=VOCAB, context=LENGTH))


SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "device and host": ({"device": "cpu", "ratio": 0.5}, {}),
    "device and nvme": ({"device": "nvme", "ratio": 0.7}, {}),
    "host and nvme": ({"device": "nvme"}, {"state_limits": {"host": "1MiB"}}),
    "all three": ({"device": "nvme"}, {"state_limits": {"device": "500KiB", "host": "300KiB", "nvme": "1GiB"}}),
}
"""Further keys of offload_optimizer and of tiered_zero."""


@pytest.mark.parametrize(("param", "optimizer", "mode"), CASES)
def test_a_run_takes_what_was_planned(swap_path: Path, param: str, optimizer: str, mode: tuple[str, int]) -> None:
    """A placement meets each model in one of its two modes."""
    name = MODELS[(DEVICES.index(param) + DEVICES.index(optimizer) + MODES.index(mode)) % 2]
    assert_planned(swap_path, name, param, mode, {"device": optimizer}, {})


SPLIT_CASES = [("host and nvme", "delayed", 1), *((split, "overlapped", 2) for split in SPLITS)]


@pytest.mark.parametrize(
    ("split", "update", "accumulation", "param"), [(*case, param) for case, param in by_turns(SPLIT_CASES, DEVICES)]
)
def test_state_on_several_tiers_takes_what_was_planned(
    swap_path: Path, param: str, split: str, update: str, accumulation: int
) -> None:
    name = MODELS[(DEVICES.index(param) + list(SPLITS).index(split)) % 2]
    assert_planned(swap_path, name, param, (update, accumulation), *SPLITS[split])


def assert_planned(
    swap_path: Path, name: str, param: str, mode: tuple[str, int], optimizer: dict[str, Any], own: dict[str, Any]
) -> None:
    update, accumulation = mode
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": str(swap_path), "max_in_cpu": 5_000},
            "offload_optimizer": {"nvme_path": str(swap_path), **optimizer},
            "stage3_param_persistence_threshold": 128,
            "sub_group_size": 50_000 if name == "gpt" else 5000,
        },
        "tiered_zero": {**SMALL_DEVICE, "device": "cpu", "update": update, "delay_start_step": 0, **own},
    }
    run_as_planned(build(name), config, swap_path)


NBYTES = {"fp32": 12, "bf16_remainder": 10, "lossy_bf16_moments": 8, "lossy_8bit_moments": 6}


@pytest.mark.parametrize(
    ("state_format", "case"),
    by_turns(
        list(NBYTES),
        [
            *((*place, update) for place in FAR for update in ("overlapped", "delayed")),
            *(("cpu", "nvme", "overlapped"), ("none", "none", "barrier")),
        ],
        3,
    ),
)
def test_each_state_format_takes_what_was_planned(
    swap_path: Path, state_format: str, case: tuple[str, str, str]
) -> None:
    param, optimizer, update = case
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": str(swap_path), "max_in_cpu": 5_000},
            "offload_optimizer": {"device": optimizer, "nvme_path": str(swap_path)},
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 50_000,
        },
        "tiered_zero": {
            **SMALL_DEVICE,
            "device": "cpu",
            "update": update,
            "delay_start_step": 0,
            "state_format": state_format,
        },
    }
    plan = run_as_planned(build("gpt"), config, swap_path)
    (row,) = (row for row in plan.rows if row.kind == "state")
    gradients = next(row.nbytes for row in plan.rows if row.kind == "gradient")
    elements = gradients // (4 if update == "delayed" else 2)
    sizes = [min(51_200, elements - start) for start in range(0, elements, 51_200)]
    scales = sum(-(-size // 8 // PAGE_NBYTES) * PAGE_NBYTES - size // 8 for size in sizes)  # to whole pages
    codes = sum(-size % PAGE_NBYTES for size in sizes)
    more = 2 * (elements // 8 + scales + codes) if state_format == "lossy_8bit_moments" else 0
    assert row.nbytes == NBYTES[state_format] * elements + more
    assert state_format in row.what


def run_as_planned(model: nn.Module, config: dict[str, Any], swap_path: Path) -> Plan:
    """Two steps: planned is allocated is measured, byte for byte, on every tier."""
    accumulation = config.get("gradient_accumulation_steps", 1)
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        tokens = torch.randint(VOCAB, (2, LENGTH))
        for _ in range(2 * accumulation):
            engine.backward(engine(tokens, tokens))
            engine.step()
        engine.flush()
        planned = {(row.tier, row.kind): row.nbytes for row in engine.plan.rows}
        peaks = {
            (tier, kind): row["peak"] for tier, kinds in engine.memory_report().items() for kind, row in kinds.items()
        }
        assert 0 <= peaks.pop(TIMED, 0) <= planned.pop(TIMED, 0)
        assert peaks == planned
        files = [file.stat() for file in swap_path.glob(f"{PREFIX}*/{DATA_NAME}")]
        assert sum(status.st_size for status in files) == engine.plan.nbytes("nvme")
        assert all(0 <= 512 * status.st_blocks - status.st_size <= 64 << 10 for status in files)  # the extent tree's
        return engine.plan
