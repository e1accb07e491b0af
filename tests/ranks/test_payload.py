"""What a step hands to collectives, counted as torch.distributed gets it, in elements with the padding of shards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.test_gradients import small_config

WIDTH = 90
NUM_BLOCKS = 4
PAGE_NUMEL = 2048
"""Shards end at multiples of it."""


class Stack(nn.Module):
    """Equal blocks, each a unit. `region`: blocks that are recomputed together; 0: none are."""

    def __init__(self, region: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        if not self.region:
            return run_blocks(self.blocks, x)
        for first in range(0, NUM_BLOCKS, self.region):
            x = checkpoint(run_blocks, self.blocks[first : first + self.region], x, use_reentrant=False)
        return x


def run_blocks(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the elements of `broadcast`, uint8 of parameters, and of `isend`, and those of the largest."""
    found: Counter[str] = Counter()

    def counts(name: str, call: Any) -> Any:
        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found[name] += tensor.numel()
            found[f"largest {name}"] = max(found[f"largest {name}"], tensor.numel())
            return call(tensor, *args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "isend"):
            patch.setattr(dist, name, counts(name, getattr(dist, name)))
        yield found


def payload(config: dict[str, Any], region: int = 0) -> dict[str, Any]:
    """Of the third step, which knows the order of the two before. The input needs a gradient, so that the backward of
    every block reads its weights."""
    torch.manual_seed(3)
    rank, accumulation = int(os.environ["RANK"]), config["gradient_accumulation_steps"]
    engine, *_ = tiered_zero.initialize(model=Stack(region), config=config)
    dtype = next(engine.module.parameters()).dtype
    for step in range(3):
        with counted() as found:
            for _ in range(accumulation):
                rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
                engine.backward(engine(rows.to(dtype).requires_grad_()).float().square().mean())
                engine.step()
    assert engine.step_report is not None
    links = engine.step_report.link_nbytes
    engine.close()
    return {**found, "itemsize": dtype.itemsize, "links": (links["all_gather"], links["reduce_scatter"])}


def padded_numel(world: int) -> int:
    """Of all blocks: a weight, then a bias at an aligned start, cut into shards of whole pages."""
    stop = WIDTH * WIDTH + (-WIDTH * WIDTH) % 64 + WIDTH
    return NUM_BLOCKS * world * PAGE_NUMEL * -(-stop // (world * PAGE_NUMEL))


def check(found: list[dict[str, Any]], gathered: int, reduced: int, sum_itemsize: int) -> None:
    """`gathered`, `reduced`: elements. `sum_itemsize`: of what is reduced."""
    for each in found:
        itemsize = each["itemsize"]
        assert each["broadcast"] == gathered * itemsize
        assert each["isend"] == reduced - reduced // len(found), "its own part stays where it is"
        assert each["links"] == (gathered * itemsize, reduced * sum_itemsize), "the report says the same"


@pytest.mark.parametrize(
    ("stage", "device", "accumulation", "world", "precision"),
    [
        (0, "cpu", 4, 4, "fp32"),
        (1, "none", 4, 2, "bf16"),
        (1, "nvme", 2, 4, "bf16"),
        (2, "none", 4, 4, "fp32"),
        (2, "cpu", 1, 2, "bf16"),
    ],
)
def test_whole_parameters(
    ranks: RankPool, swap_path: Path, stage: int, device: str, accumulation: int, world: int, precision: str
) -> None:
    """N to gather, the new parameters or, at stage 0, the sums; and N for each reduction: one where gradients are whole
    on the device or at stage 0, else one a micro-batch."""
    config = small_config(
        str(swap_path), stage, device, gradient_accumulation_steps=accumulation,
        bf16={"enabled": precision == "bf16"},
    )  # fmt: skip
    numel, reduces_each = padded_numel(world), stage == 2 or (stage == 1 and device != "none")
    found = ranks.run(payload, world, config)
    sums_wide = precision == "fp32" or (accumulation > 1 and not reduces_each)
    check(found, numel, numel * (accumulation if reduces_each else 1), 4 if sums_wide else 2)


@pytest.mark.parametrize(
    ("accumulation", "region", "world", "ahead", "precision"),
    [
        (2, 0, 4, 1 << 20, "bf16"),
        (1, 1, 4, 1 << 20, "fp32"),
        (4, 1, 2, 0, "bf16"),
        (2, 2, 2, 0, "fp32"),
    ],
)
def test_sharded_parameters(
    ranks: RankPool, swap_path: Path, accumulation: int, region: int, world: int, ahead: int, precision: str
) -> None:
    """K (r + 1) N with r = 2, with recomputation too: backward follows while its units are there. Less the last block
    of each forward, which backward finds if it begins with that, and the first, which the next forward of the step
    finds."""
    zero = {"stage3_prefetch_bucket_size": ahead, "stage3_max_reuse_distance": 0}
    config = small_config(
        str(swap_path), 3, "cpu", gradient_accumulation_steps=accumulation, zero=zero,
        bf16={"enabled": precision == "bf16"},
    )  # fmt: skip
    num_found = (accumulation if region < 2 else 0) + accumulation - 1
    num_gathers, numel = 2 * accumulation * NUM_BLOCKS - num_found, padded_numel(world)
    itemsize = 2 if precision == "bf16" else 4
    found = ranks.run(payload, world, config, region)
    check(found, num_gathers * numel // NUM_BLOCKS, accumulation * numel, itemsize)
