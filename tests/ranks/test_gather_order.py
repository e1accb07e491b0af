"""Every rank gathers the same units in the same order, whatever is late and whatever experts it chooses; where ranks
use other modules, every one says which."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tiered_zero
from tests.ranks import routed
from tests.ranks.pool import RankPool
from tests.ranks.routed import Run
from tests.ranks.training import (
    Case,
    assert_all_ranks_agree,
    begin_run,
    differences,
    make_optimizer,
    micro_batches,
    rank_and_config,
)
from tiered_zero.errors import RankError

NVME = {
    "offload_param": {"device": "nvme", "max_in_cpu": 0},
    "offload_optimizer": {"device": "nvme"},
    "reduce_bucket_size": 2048,
}
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 2048}


@pytest.mark.parametrize(
    "run",
    [
        Run(zero=HOST),
        Run(zero=HOST, recomputes=True),
        Run(zero={**NVME, "stage3_max_live_parameters": 0}, delays=True),
        Run(zero=NVME, delays=True, recomputes=True, runtime={"update": "overlapped"}),
        Run(zero=HOST, routes=False, forwards=2),
        Run(zero={**NVME, "stage3_max_live_parameters": 0}, delays=True, lists=True),
    ],
)
def test_experts_differ_by_rank(ranks: RankPool, swap_path: Path, run: Run) -> None:
    found = ranks.run(routed.train_tiered, 2, run, str(swap_path))
    assert_all_ranks_agree(found)
    expected = ranks.run(routed.train_plain, 2, run)
    assert differences(found[0]["weights"], expected[0]["weights"]) == []
    assert [each["losses"] for each in found] == [each["losses"] for each in expected]
    assert found[0]["units"] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "first", "last"], "with all experts"


def route_backwards_apart(path: str) -> dict[str, Any]:
    """Two backwards before each step(), in 16 bit; rank 1 uses other experts in the second, and rank 0 the same."""
    lazy = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 20480}
    rank, config = rank_and_config(path, stage=3, offload_param={"device": "cpu"}, sub_group_size=1, **lazy)
    config["bf16"] = {"enabled": True}
    torch.manual_seed(5)
    model: Any = routed.RoutedModel(False)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "adamw"), config=config)
    try:
        for step in range(2):
            rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
            for which in range(2):
                engine.backward(engine(rows, rank * which).float().square().mean())
            engine.step()
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return {"weights": weights, "norms": [engine.get_global_grad_norm()]}
    finally:
        engine.close()


def test_a_second_backward_with_other_experts_ends(ranks: RankPool, swap_path: Path) -> None:
    """Units of which it adds to sums are turned to fp32 as it begins, which waits for their earlier buckets."""
    assert_all_ranks_agree(ranks.run(route_backwards_apart, 2, str(swap_path)))


class Hidden(nn.Module):
    """Blocks: the inputs of `num_hidden` are in a list, as inputs are that no hook finds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(routed.Routed() for _ in range(5))

    def forward(self, x: torch.Tensor, num_hidden: int) -> torch.Tensor:
        x = x @ torch.ones(routed.HIDDEN, routed.HIDDEN, requires_grad=True)
        for index, block in enumerate(self.blocks):
            x = block([x] if index < num_hidden else x, 0)
        return x.square().mean()


def hide_inputs(path: str, num_hidden: int, bucket_numel: int, slow_s: float) -> dict[str, Any]:
    """Rank 1 hides inputs. Rank 0's reductions take `slow_s` and more."""
    lazy = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": bucket_numel}
    rank, config = rank_and_config(path, stage=3, offload_param={"device": "cpu"}, **lazy)
    torch.manual_seed(5)
    model = Hidden()
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "sgd"), config=config)
    norms, send = [], dist.isend

    def send_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(slow_s)
        return send(*args, **kwargs)

    slow = patch.object(dist, "isend", send_slowly) if slow_s and rank == 0 else nullcontext()
    try:
        for step in range(2):
            rows = torch.randn(5, routed.HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
            with slow if step == 0 else nullcontext():
                engine.backward(engine(rows, num_hidden if rank == 1 else 0))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return {"weights": weights, "norms": norms}
    finally:
        engine.close()


@pytest.mark.parametrize(("num_hidden", "bucket_numel", "slow_s"), [(5, 4096, 0.0), (4, 2048, 0.1)])
def test_inputs_that_one_rank_hides_change_no_order(
    ranks: RankPool, swap_path: Path, num_hidden: int, bucket_numel: int, slow_s: float
) -> None:
    """Neither does the time that a reduction takes on one rank: a bucket without memory waits for it."""
    assert_all_ranks_agree(ranks.run(hide_inputs, 2, str(swap_path), num_hidden, bucket_numel, slow_s))


def retain_alone(path: str) -> list[Any]:
    """In step 2 rank 0 alone keeps the graph, and reads a state_dict without parameters before step()."""
    lazy = {"stage3_prefetch_bucket_size": 1 << 20, "stage3_max_reuse_distance": 0}
    rank, config = rank_and_config(path, stage=3, offload_param={"device": "cpu"}, **lazy)
    torch.manual_seed(5)
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)), nn.Tanh())
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "sgd"), config=config)
    norms = []
    try:
        for step in range(4):
            is_other = step == 2 and rank == 0
            rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            engine.backward(engine(rows).square().mean(), retain_graph=is_other)
            if is_other:
                model[6].state_dict()
            engine.step()
            norms.append(engine.get_global_grad_norm())
    finally:
        engine.close()
    return norms


def test_what_one_rank_does_beside_a_backward_changes_no_gather(ranks: RankPool, swap_path: Path) -> None:
    """What each rank's own calls say of the step, as whether an update may begin in backward, is not of gathers."""
    first, second = ranks.run(retain_alone, 2, str(swap_path))
    assert len(first) == 4
    assert first == second


def use_another_module(path: str) -> str:
    """In step 1 rank 0 alone goes by way of a layer."""
    lazy = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    rank, _, engine = begin_run(path, stage=3, offload_param={"device": "cpu"}, **lazy)
    try:
        for step in range(2):
            engine.backward(engine(*micro_batches(Case(), step, rank, 2)[0], detour=step == 1 and rank == 0))
            engine.step()
    except RankError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_ranks_that_use_other_modules_are_named(ranks: RankPool, swap_path: Path) -> None:
    """Their gathers are of one size: without a comparison each would compute with parts of the other's weights."""
    for text in ranks.run(use_another_module, 2, str(swap_path)):
        assert "rank 0 gathers sometimes:float32, change 1, as collective " in text, text
        assert "Every rank was expected to use the same modules in the same order" in text
    assert not any(swap_path.iterdir())


def evaluate_alone(path: str) -> str:
    """Rank 0 evaluates, rank 1 goes on to step()."""
    rank, _, engine = begin_run(path, stage=3)
    rows = micro_batches(Case(), 0, rank, 2)[0]
    try:
        engine.backward(engine(*rows))
        if rank == 0:
            engine.eval()
            with torch.no_grad():
                engine(*rows)
        engine.step()
    except RankError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_rank_that_evaluates_alone_is_named_before_the_timeout(ranks: RankPool, swap_path: Path) -> None:
    first, second = ranks.run(evaluate_alone, 2, str(swap_path))
    assert first == second
    assert (
        "Every rank was expected to make the same calls in the same order; found rank 0: all_gather of unit " in first
    )
    assert "rank 1: control of step 0. None of them can go on." in first
