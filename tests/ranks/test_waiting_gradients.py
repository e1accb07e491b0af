"""Gradients of shards that wait for their bucket: for how long, in how many bytes, and how they are added up."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.ranks import routed
from tests.ranks.pool import RankPool
from tests.ranks.routed import Run
from tests.ranks.training import assert_all_ranks_agree, differences, make_optimizer, rank_and_config
from tiered_zero.deepspeed.utils import safe_get_full_fp32_param

SMALL = {"reduce_bucket_size": 2048}
"""Elements: less than one block with its experts."""


@pytest.mark.parametrize(
    ("world", "run"),
    [
        (4, Run(zero={"stage": 2, **SMALL}, steps=4)),
        (2, Run(zero={"stage": 2, **SMALL}, own=True, recomputes="reentrant")),
        (2, Run(zero={"stage": 3, **SMALL})),
        (2, Run(zero={"stage": 1, "offload_optimizer": {"device": "cpu"}, **SMALL}, delays=True)),
    ],
)
def test_experts_without_gradients_keep_none_waiting(ranks: RankPool, swap_path: Path, world: int, run: Run) -> None:
    """Two of three experts of each block get no gradient: the block's bucket leaves when backward is through it, and
    its gradients alone wait until then. All that a rank has are those of one expert and a norm in each block."""
    run = replace(run, num_blocks=10)
    found = ranks.run(routed.train_tiered, world, run, str(swap_path))
    assert_all_ranks_agree(found)
    units_in_flight = 2 if run.delays else 1  # an accelerator that runs late has room for those of a second unit
    for rank in found:
        assert rank["in_flight"]["planned"] == units_in_flight * rank["largest"]
        assert rank["largest"] < run.num_blocks * 4 * routed.HIDDEN**2 / 2
        assert 0 < rank["in_flight"]["peak"] <= rank["in_flight"]["planned"]
    if world == 2:
        expected = ranks.run(routed.train_plain, world, run)
        assert differences(found[0]["weights"], expected[0]["weights"]) == []
    whole = ranks.run(routed.train_tiered, world, replace(run, zero={"stage": 0, **SMALL}), str(swap_path))
    assert differences(found[0]["weights"], whole[0]["weights"]) == []


@pytest.mark.parametrize(
    "run",
    [
        Run(zero={"stage": 2}, skips=True, pools=True),
        Run(zero={"stage": 3}, skips=True, own=True),
        Run(zero={"stage": 3}, recomputes=True, accumulation=2, steps=4),
        Run(zero={"stage": 3}, recomputes="reentrant"),
        Run(zero={"stage": 3}, lists=True),
    ],
)
def test_gradients_of_at_most_two_buckets_wait(ranks: RankPool, swap_path: Path, run: Run) -> None:
    """In the first step too, in one that leaves a parameter of the last block out, and behind a unit that no loss
    depends on."""
    bucket_numel, num_blocks = 1 << 13, 10
    run = replace(run, zero={**run.zero, "reduce_bucket_size": bucket_numel}, num_blocks=num_blocks)
    for found in ranks.run(routed.train_tiered, 2, run, str(swap_path)):
        assert num_blocks * routed.HIDDEN**2 > 2 * bucket_numel, "else all gradients are of two buckets"
        assert found["in_flight"]["peak"] <= 2 * bucket_numel * 4


@pytest.mark.parametrize("stage", [2, 3])
def test_reentrant_checkpoints_are_a_part_of_the_scripts_backward(ranks: RankPool, swap_path: Path, stage: int) -> None:
    """Each micro-batch reduces once, in 16 bit, and adds up in fp32, whoever starts it and however it recomputes."""
    run = Run(zero={"stage": stage, **SMALL}, accumulation=2, steps=4, config={"bf16": {"enabled": True}})
    first: list[Any] = []
    for own, recomputes in ((False, True), (False, "reentrant"), (True, "reentrant")):
        found = ranks.run(routed.train_tiered, 2, replace(run, own=own, recomputes=recomputes), str(swap_path))
        assert_all_ranks_agree(found)
        first = first or found
        assert differences(found[0]["weights"], first[0]["weights"]) == []
        assert [rank["reduced"] for rank in found] == [rank["reduced"] for rank in first]


class Bank(nn.Module):
    """Weights of a module that is never called, and one whose weight is used before it is called, and after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, bank, middle, last = self.layers
        x = nn.functional.linear(first(x), middle.weight)
        x = nn.functional.linear(x, bank.weight)
        return last(middle(x).tanh())  # type: ignore[no-any-return]


def micro_batch(number: int, rank: int) -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * number + rank)).bfloat16()


def train_bank(stage: int) -> dict[str, Any]:
    """One step of two micro-batches. Returns fp32 masters before it and after."""
    rank = int(os.environ["RANK"])
    model = Bank()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 256},
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    masters = [{name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}]
    for number in range(2):
        engine.backward(engine(micro_batch(number, rank)).float().square().mean())
        engine.step()
    masters.append({name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()})
    in_flight = engine.memory_report()["device"]["gradient_in_flight"]
    engine.close()
    return {"before": masters[0], "after": masters[1], "in_flight": in_flight}


def gradients_of_ranks() -> dict[str, list[list[Tensor]]]:
    """Parameter -> gradients of plain PyTorch in 16 bit, by micro-batch and rank."""
    model = Bank().bfloat16()
    found: dict[str, list[list[Tensor]]] = {name: [[], []] for name, _ in model.named_parameters()}
    for number in range(2):
        for rank in range(2):
            model.zero_grad()
            (model(micro_batch(number, rank)).float().square().mean() / 2).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                found[name][number].append(param.grad)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_come_after_their_bucket_are_added_up_in_fp32(ranks: RankPool, stage: int) -> None:
    """They wait for the next backward, which begins by reducing them: each micro-batch is averaged in 16 bits, as those
    of modules that are only called, and the averages are added up in fp32."""
    found = ranks.run(train_bank, 2, stage)
    for name, micro_grads in gradients_of_ranks().items():
        first, second = [(grads[0].float() / 2 + grads[1].float() / 2).bfloat16().float() for grads in micro_grads]
        total = first + second
        for rank in found:
            assert torch.equal(rank["after"][name], rank["before"][name] - total * 0.5), name
    for rank in found:
        assert rank["in_flight"]["now"] == 0


class Adapted(nn.Module):
    """Two layers in 16 bits, each with an adapter in fp32: in backward the two units of the block take turns."""

    def __init__(self, trains_base: bool) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(32, 32, bias=False).bfloat16() for _ in range(2)).requires_grad_(
            trains_base
        )
        self.adapters = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for base, adapter in zip(self.base, self.adapters, strict=True):
            x = torch.tanh(base(x.bfloat16()) + adapter(x))
        return x


def train_adapted(path: str, gradients: str, trains_base: bool) -> dict[str, Any]:
    rank, config = rank_and_config(path, stage=3, offload_param={"device": "cpu"}, reduce_bucket_size=2048)
    config |= {"gradient_clipping": 1.0}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["tiered_zero"] |= {"gradients": gradients, "unit_size_cap": 2048}
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(trains_base) for _ in range(3)))
    with tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "adamw"), config=config)[0] as engine:
        for step in range(2):
            torch.manual_seed(2 * step + rank)
            engine.backward(engine(torch.randn(2, 32)).square().mean())
            engine.step()
        beyond = [
            (kind, sizes)
            for kinds in engine.memory_report().values()
            for kind, sizes in kinds.items()
            if sizes["peak"] > sizes["planned"]
        ]
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        weights = {name: safe_get_full_fp32_param(param) for name, param in trained.items()}
        return {"beyond": beyond, "weights": weights}


@pytest.mark.parametrize("trains_base", [False, True])
def test_units_of_a_block_wait_for_their_bucket(ranks: RankPool, swap_path: Path, trains_base: bool) -> None:
    """The other unit of the block, which backward uses between two gradients of a unit, does not end the unit."""
    places = ("cpu", "nvme")
    found = [each for place in places for each in ranks.run(train_adapted, 2, str(swap_path), place, trains_base)]
    for each in found:
        assert each["beyond"] == []
        assert differences(each["weights"], found[0]["weights"]) == []
