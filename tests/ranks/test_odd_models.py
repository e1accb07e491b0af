"""Ranks on a model of odd sizes, whose parts each rank uses when it likes: against plain torch and all_reduce."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.training import assert_all_ranks_agree, differences

STEPS = 4

USES: dict[tuple[int, int], tuple[int, ...]] = {
    (0, 0): (0,),
    (0, 1): (1,),
    (1, 0): (0, 1),
    (2, 1): (2,),
    (3, 0): (2, 0),
    (3, 3): (1,),
}
"""(step, rank) -> which parts its forwards use, one after another; others use none."""


class Odd(nn.Module):
    """Parameters smaller than the world, a unit of an odd size, parts that are used at times, and a parameter that two
    modules share, one of which only calls a function with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(3, 1)
        self.wide = nn.Linear(1, 4099)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7)) for _ in range(3))
        self.fold = nn.Linear(4099, 7, bias=False)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(()))
        self.never = nn.Parameter(torch.ones(3, 3))
        self.last = nn.Linear(7, 2)

    def forward(self, rows: Tensor, part: int | None) -> Tensor:
        x = self.frozen(self.fold(self.wide(self.first(rows)).tanh()))
        if part is not None:
            x = x + self.parts[part](x)
        x = nn.functional.linear(x, self.fold.weight[:, :7])
        out: Tensor = self.last(x + self.shift)
        return out.square().mean()


def batches(step: int, rank: int) -> list[tuple[Tensor, int | None]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    parts: tuple[int | None, ...] = USES.get((step, rank), (None,))
    return [(torch.randn(2, 3, generator=generator), part) for part in (parts if step else (*parts, None))]


def make_optimizer(model: Odd) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 1e-3, "weight_decay": 0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def train_by_hand() -> dict[str, Tensor]:
    """Plain torch: gradients are divided by the number of ranks, summed over those, and None where no rank has any."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model = Odd()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        loss = sum((model(*batch) for batch in batches(step, rank)), start=torch.zeros(()))
        assert isinstance(loss, Tensor)
        loss.backward()
        for param in model.parameters():
            if not param.requires_grad:
                continue
            has = torch.tensor(float(param.grad is not None))
            dist.all_reduce(has)
            if has:
                total = torch.zeros_like(param) if param.grad is None else param.grad / world
                dist.all_reduce(total)
                param.grad = total
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(path: str, stage: int, device: str, zero: dict[str, Any], seed: int | None, own: bool) -> dict[str, Any]:
    """The same over the engine. Rank 0 evaluates between steps. `seed`: transfers are late, by other times on each
    rank. `own`: the script calls loss.backward() itself."""
    rank = int(os.environ["RANK"])
    offload = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    late = {} if seed is None else {"debug_delay_seed": seed + rank}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "offload_optimizer": offload, "sub_group_size": 1, **zero},
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60, **late},
    }
    model = Odd()
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model), config=config)
    for step in range(STEPS):
        loss = sum((engine(*batch) for batch in batches(step, rank)), start=torch.zeros(()))
        assert isinstance(loss, Tensor)
        if own:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        if rank == 0:
            with torch.no_grad():
                engine(torch.ones(1, 3), step % 3)
    found = {
        "weights": {name: value.clone() for name, value in engine.module.state_dict().items()},
        "norms": engine.get_global_grad_norm(),
    }
    engine.close()
    return found


@pytest.mark.parametrize(
    ("stage", "device", "seed", "own"),
    [
        (0, "none", None, False),
        (0, "cpu", 1, False),
        (1, "none", 2, True),
        (1, "nvme", 3, False),
        (2, "none", 4, False),
        (2, "cpu", 5, True),
        (2, "nvme", None, False),
    ],
)
def test_two_ranks_are_plain_torch(
    ranks: RankPool, swap_path: Path, stage: int, device: str, seed: int | None, own: bool
) -> None:
    found = ranks.run(train, 2, str(swap_path), stage, device, {}, seed, own)
    assert_all_ranks_agree(found)
    expected = ranks.run(train_by_hand, 2)[0]
    assert differences(found[0]["weights"], expected) == []


def test_four_ranks_are_the_same_at_every_stage_and_tier(ranks: RankPool, swap_path: Path) -> None:
    """With buckets of few elements too, whose borders change the order of sums: then for all."""
    places: dict[int, list[tuple[int, str, int | None]]] = {
        5_000_000: [(0, "cpu", None), (1, "cpu", 2), (2, "nvme", 3)],
        5000: [(0, "cpu", None), (1, "none", 1), (2, "none", None)],
    }
    for bucket_numel in places:
        first: list[Any] = []
        zero = {"reduce_bucket_size": bucket_numel}
        for stage, device, seed in places[bucket_numel]:
            found = ranks.run(train, 4, str(swap_path), stage, device, zero, seed, False)
            assert_all_ranks_agree(found)
            first = first or found
            assert differences(found[0]["weights"], first[0]["weights"]) == [], (zero, stage, device)
