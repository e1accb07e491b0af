"""What ranks run in tests: one training loop, over the engine and over torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tiered_zero
from tests.support.inspection import units
from tests.support.models import ParityGPT, batch

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of ParityGPT. `detours`: (step, rank) in which the layer that is used in some steps only is used.
    `optimizer`: "groups" has two param groups. `delays`: transfers are late, by other times on each rank. `scale`:
    factors on the loss, (step, rank) -> factor. `reduces_each`: the reference reduces each micro-batch, and adds the
    averages."""

    steps: int = 4
    reduces_each: bool = False
    accumulation: int = 1
    clipping: float = 0.0
    optimizer: str = "adamw"
    delays: bool = False
    detours: tuple[tuple[int, int], ...] = ((1, 0), (2, 0), (2, 1))
    scale: Mapping[tuple[int, int], float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)


def build_model(rank: int) -> nn.Module:
    """The same buffers and frozen values on every rank; parameters are rank 0's, once they are broadcast."""
    torch.manual_seed(3)
    model = ParityGPT()
    if rank:
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(rank)
    return model


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1)
    if name == "adafactor":
        return torch.optim.Adafactor(params, lr=1e-3)
    if name == "muon":
        return torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2)
    if name in ("adamw", "fused"):
        return torch.optim.AdamW(params, lr=3e-3, fused=name == "fused")
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}], lr=3e-3
    )


def rank_and_config(path: str, **zero: Any) -> tuple[int, dict[str, Any]]:
    """This rank, and a config with state on NVMe where `zero` says nothing else."""
    section = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": path}, **zero}
    return int(os.environ["RANK"]), {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "zero_optimization": section,
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60},
    }


def begin_run(path: str, **zero: Any) -> tuple[int, Any, tiered_zero.Engine]:
    """This rank, a ParityGPT and its engine, which trains with AdamW."""
    rank, config = rank_and_config(path, **zero)
    model = build_model(rank)
    optimizer = make_optimizer(model, "adamw")
    return rank, model, tiered_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def micro_batches(case: Case, step: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    first = (step * case.accumulation) * world + rank
    return [batch(first + micro * world) for micro in range(case.accumulation)]


def train_tiered(case: Case, swap_path: str) -> dict[str, Any]:
    """This rank's part of the run: weights, norms, losses, and what its plan and ledger say."""
    rank, world = _place()
    model = build_model(rank)
    section = {"stage": 0, **case.zero}
    for key in ("offload_param", "offload_optimizer"):
        if section.get(key, {}).get("device") == "nvme":
            section[key] = {**section[key], "nvme_path": swap_path}
    runtime = {"debug_delay_seed": rank} if case.delays else {}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "zero_optimization": {"sub_group_size": 1, **section},
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60, **runtime, **case.runtime},
        **case.config,
    }
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, case.optimizer), config=config)
    losses, norms, applied = [], [], []
    for step in range(case.steps):
        for tokens, targets in micro_batches(case, step, rank, world):
            loss = engine(tokens, targets, detour=(step, rank) in case.detours)
            losses.append(loss.item())
            engine.backward(loss * case.scale.get((step, rank), 1.0))
            if engine.config.managed_gradient_accumulation:
                engine.step()
        if not engine.config.managed_gradient_accumulation:
            engine.step()
        norms.append(engine.get_global_grad_norm())
        applied.append(engine.was_step_applied())
    found = {
        "weights": {name: value.clone() for name, value in engine.module.state_dict().items()},
        "losses": losses,
        "norms": norms,
        "applied": applied,
        "policy": engine.plan.update_policy.text,
        "memory": engine.memory_report(),
        "plan": [(row.tier, row.kind, row.nbytes) for row in engine.plan.rows],
        "units": [(unit.trainable, unit.numel, unit.nbytes) for unit in units(engine)],
        "links": engine.step_report.link_nbytes if engine.step_report else {},
        "world": engine.world_size,
        "loss_scale": engine.loss_scale,
        "activations": engine.step_report.activations if engine.step_report else {},
    }
    engine.close()
    return found


def _average_in_order(world: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Add the ranks' gradients one after another. torch's own order of more than two depends on the bucket."""
    own = bucket.buffer() / world
    dist.all_gather(parts := [torch.empty_like(own) for _ in range(world)], own)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(functools.reduce(torch.add, parts))
    return future


def train_distributed(case: Case) -> dict[str, Any]:
    """The same with DistributedDataParallel, as a script of torch would: `no_sync` but for the last micro-batch, or
    with gradients that are taken after each. More ranks than two are added in their order."""
    rank, world = _place()
    if world > 1:
        dist.init_process_group("gloo")
    model = build_model(rank)
    optimizer = make_optimizer(model, case.optimizer)
    wrapped: nn.Module = DistributedDataParallel(model, find_unused_parameters=True) if world > 1 else model
    if world > 2:
        wrapped.register_comm_hook(world, lambda state, bucket: _average_in_order(state, bucket))
    losses, norms = [], []
    for step in range(case.steps):
        batches = micro_batches(case, step, rank, world)
        sums: dict[nn.Parameter, Tensor] = {}
        for number, (tokens, targets) in enumerate(batches):
            if world > 1:
                is_last = number == len(batches) - 1
                wrapped.require_backward_grad_sync = is_last or case.reduces_each  # what no_sync() sets
            loss = wrapped(tokens, targets, detour=(step, rank) in case.detours)
            losses.append(loss.item())
            (loss * case.scale.get((step, rank), 1.0) / case.accumulation).backward()
            for param in model.parameters() if case.reduces_each else ():
                if param.grad is not None:
                    sums[param] = sums[param] + param.grad if param in sums else param.grad
                    param.grad = None
        params = list(model.parameters())
        for param, total in sums.items():
            param.grad = total
        norms.append(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]).item())
        if case.clipping:
            nn.utils.clip_grad_norm_(params, case.clipping)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "losses": losses,
        "norms": norms,
    }


def differences(left: Weights, right: Weights) -> list[str]:
    """Names of what differs in any bit."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def assert_all_ranks_agree(found: Sequence[Mapping[str, Any]]) -> None:
    """Every rank has the same weights and norms, and made the same decisions."""
    first = found[0]
    for other in found[1:]:
        assert differences(first["weights"], other["weights"]) == []
        assert repr(first["norms"]) == repr(other["norms"]), "nan too"
        assert first.get("applied") == other.get("applied")


def _place() -> tuple[int, int]:
    """(rank, world size) as the launcher says."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
