"""How gradients of many ranks are scaled and summed: each of DeepSpeed's keys against what it says, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.ranks.pool import RankPool
from tests.support.inspection import recorder

WORLD = 3
"""Not a power of two: where the division comes changes bits."""

ROWS = torch.tensor([[5.0, 7.0, 1.0, -11.0], [2.0, 6.0, 1.0, 0.0], [13.0, -9.0, 3.0, 4.0]])
"""By rank: the gradient of its loss."""


def one_step(path: str, stage: int, device: str, keys: dict[str, Any]) -> Tensor:
    """The gradient as the update has seen it: SGD with a rate of 1 from weights of 0."""
    offload = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60},
        **keys,
    }
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    row = ROWS[int(os.environ["RANK"])]
    engine.backward(engine(row.to(model.weight.dtype)).sum())
    engine.step()
    weight = engine.module.state_dict()["weight"].clone()
    engine.close()
    return -weight.float().flatten()


def exact(rows: Tensor, dtype: torch.dtype, divisor: Fraction) -> list[set[float]]:
    """The sum, which is exact, divided and rounded once."""
    sums = [sum(map(Fraction, column)) / divisor for column in rows.T.tolist()]
    return [{torch.tensor(float(total), dtype=torch.float64).to(dtype).item()} for total in sums]


def divided(rows: Tensor, dtype: torch.dtype, divisor: float) -> list[set[float]]:
    """Each divided and rounded, then added in any order: the network chooses it."""
    parts = torch.div(rows.to(dtype), divisor)
    return [{_add([column[i] for i in order]) for order in permutations(range(len(column)))} for column in parts.T]


def _add(values: list[Tensor]) -> float:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total.item()


F32, BF16 = torch.float32, torch.bfloat16
CASES: dict[str, tuple[dict[str, Any], Callable[[], list[set[float]]]]] = {
    "unset": ({}, lambda: divided(ROWS, F32, 3.0)),
    "prescale": ({"prescale_gradients": True}, lambda: divided(ROWS, F32, 3.0)),
    "postscale": ({"prescale_gradients": False}, lambda: exact(ROWS, F32, Fraction(3))),
    "predivide": ({"gradient_predivide_factor": 2.0}, lambda: exact(ROWS, F32, Fraction(3))),
    "predivide by all": ({"gradient_predivide_factor": 3.0}, lambda: divided(ROWS, F32, 3.0)),
    "no predivide": (
        {"gradient_predivide_factor": 2.0, "prescale_gradients": True},
        lambda: divided(ROWS, F32, 3.0),
    ),
    "sum": ({"gradient_allreduce_op": "sum"}, lambda: exact(ROWS, F32, Fraction(1))),
    "sum, divided before": (
        {"gradient_allreduce_op": "sum", "gradient_predivide_factor": 2.0},
        lambda: exact(ROWS, F32, Fraction(1)),
    ),
    "in bf16": ({"communication_data_type": "bf16"}, lambda: divided(ROWS, BF16, 3.0)),
    "of bf16 in fp32": (
        {"communication_data_type": "fp32", "bf16": {"enabled": True}},
        lambda: [{torch.tensor(v).to(BF16).item() for v in values} for values in divided(ROWS, F32, 3.0)],
    ),
}


@pytest.mark.parametrize(("number", "stage", "device"), [(0, 0, "cpu"), (1, 1, "none"), (0, 1, "nvme"), (1, 2, "none")])
def test_gradients_are_scaled_as_the_keys_say(
    ranks: RankPool, swap_path: Path, number: int, stage: int, device: str
) -> None:
    """A key meets two of the four places, by turns."""
    for name, (keys, expected) in list(CASES.items())[number::2]:
        for found in ranks.run(one_step, WORLD, str(swap_path), stage, device, keys):
            for value, allowed in zip(found.tolist(), expected(), strict=True):
                assert value in allowed, name


def reduce_one_by_one(overlap: bool) -> list[tuple[str, float, float]]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096, "overlap_comm": overlap},
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60},
    }
    engine, *_ = tiered_zero.initialize(model=model, config=config)
    recorder(engine).keep_spans = True
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    spans = recorder(engine).take_spans()
    engine.close()
    return [
        (span.lane, span.start_s, span.end_s)
        for span in spans
        if span.lane == "reduce_scatter" or (span.lane == "compute" and span.kind == "reduce")
    ]


def test_without_overlap_backward_waits_for_each_reduction(ranks: RankPool) -> None:
    """Each bucket is filled once the one before is reduced."""
    for spans in ranks.run(reduce_one_by_one, 2, False):
        packs = sorted(span[1:] for span in spans if span[0] == "compute")
        reductions = sorted(span[1:] for span in spans if span[0] == "reduce_scatter")
        assert len(packs) == len(reductions) > 4
        assert all(pack[0] >= before[1] for pack, before in zip(packs[1:], reductions, strict=False))
