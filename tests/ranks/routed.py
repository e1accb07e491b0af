"""A model of blocks with experts, of which each rank chooses others: trained by the engine, and by a
loop of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.support.inspection import units

HIDDEN = 48


class Routed(nn.Module):
    """x, or the one in a list, + an expert of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.tiny = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor | list[Tensor], which: int, scales: bool = True) -> Tensor:
        x = x[0] if isinstance(x, list) else x
        change = self.experts[which](self.norm(x)).tanh()
        return x + (self.tiny * change if scales else change)


class RoutedModel(nn.Module):
    """`lists`: a block is a list of experts, which has no forward. `pools`: a last module is called, and the loss is of
    what comes before it."""

    def __init__(self, recomputes: bool | str, num_blocks: int = 4, lists: bool = False, pools: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, HIDDEN)
        blocks = (Routed() for _ in range(num_blocks))
        self.blocks = nn.ModuleList(block.experts if lists else block for block in blocks)
        self.last = nn.Linear(HIDDEN, 4)
        if pools:
            self.pool = nn.Linear(HIDDEN, HIDDEN)
        self.recomputes = recomputes

    def forward(self, x: Tensor, which: int, scales: bool = True) -> Tensor:
        """`scales`: whether the last block uses all of its parameters but experts."""
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            chosen = (which + number) % 3
            if isinstance(block, nn.ModuleList):
                x = x + block[chosen](x).tanh()
            elif self.recomputes:
                x = checkpoint(block, x, chosen, use_reentrant=self.recomputes == "reentrant")
            else:
                x = block(x, chosen, scales or number < len(self.blocks) - 1)
        if hasattr(self, "pool"):
            self.pool(x).tanh()
        return self.last(x)


@dataclass(frozen=True, kw_only=True)
class Run:
    """`routes`: rank 0 chooses other experts in each step, the other ranks the same ones. `forwards`: before one
    backward. `recomputes`: backward computes each block again, "reentrant" in a backward inside of it. `own`: the
    script calls loss.backward(). `delays`: transfers are late, by other times on each rank. `lists`, `pools`: of the
    model. `skips`: step 1 leaves a parameter of the last block out."""

    zero: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)
    routes: bool = True
    recomputes: bool | str = False
    own: bool = False
    accumulation: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    forwards: int = 1
    num_blocks: int = 4
    steps: int = 3
    delays: bool = False
    lists: bool = False
    pools: bool = False
    skips: bool = False


def _loss(model: Any, run: Run, step: int, rank: int) -> Tensor:
    losses, where = [], run.runtime.get("device", "cpu")
    for number in range(run.forwards):
        rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))
        losses.append(
            model(
                rows.to(where, next(model.parameters()).dtype),
                (0 if run.routes and rank else step) + number,
                not (run.skips and step == 1),
            )
            .float()
            .square()
            .mean()
        )
    return torch.stack(losses).sum()


def _build(run: Run) -> tuple[RoutedModel, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = RoutedModel(run.recomputes, run.num_blocks, run.lists, run.pools)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_tiered(run: Run, swap_path: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    model, optimizer = _build(run)
    zero = {"stage": 3, "sub_group_size": 1, **run.zero}
    for key in ("offload_param", "offload_optimizer"):
        if zero.get(key, {}).get("device") == "nvme":
            zero[key] = {**zero[key], "nvme_path": swap_path}
    runtime = {"debug_delay_seed": rank + 1} if run.delays else {}
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60, **runtime, **run.runtime},
        **run.config,
    }
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(run.steps):
        loss = _loss(engine, run, step, rank)
        losses.append(loss.item())
        if run.own:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    found = {
        "weights": {name: value.cpu().clone() for name, value in engine.module.state_dict().items()},
        "losses": losses,
        "norms": [],
        "policy": engine.plan.update_policy.text,
        "units": sorted({unit.module for unit in units(engine)}),
        "in_flight": engine.memory_report()["device"].get("gradient_in_flight"),  # none where all rest on the device
        "largest": max(unit.nbytes for unit in units(engine)),
        "reduced": engine.rank_report()["reduced_nbytes"],
    }
    engine.close()
    return found


def train_plain(run: Run) -> dict[str, Any]:
    """The same by a loop of torch, which averages the gradients that any rank has; DistributedDataParallel takes no
    second forward before a backward."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model, optimizer = _build(run)
    losses = []
    for step in range(run.steps):
        loss = _loss(model, run, step, rank)
        losses.append(loss.item())
        loss.backward()
        for param in model.parameters():
            has_any = torch.tensor(float(param.grad is not None))
            dist.all_reduce(has_any)
            if has_any:
                param.grad = (torch.zeros_like(param) if param.grad is None else param.grad) / world
                dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": {name: value.clone() for name, value in model.state_dict().items()}, "losses": losses}
