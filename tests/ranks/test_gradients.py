"""Gradients on their way between ranks: what moves when, in which order, and what each rank keeps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.training import Case, begin_run, micro_batches
from tests.support.inspection import recorder, units


def leave_ranks_out(path: str, stage: int, device: str) -> str:
    """What `no_sync` says; where it is allowed, one backward inside it and one outside, then a step."""
    offload = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    rank, _, engine = begin_run(path, stage=stage, offload_optimizer=offload)
    try:
        with engine.no_sync():
            engine.backward(engine(*micro_batches(Case(), 0, rank, 2)[0]))
        engine.backward(engine(*micro_batches(Case(), 1, rank, 2)[0]))
        engine.step()
    except tiered_zero.errors.ModelError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(("stage", "device"), [(0, "cpu"), (1, "none"), (1, "cpu"), (2, "none")])
def test_no_sync_is_for_whole_gradients(ranks: RankPool, swap_path: Path, stage: int, device: str) -> None:
    is_whole = (stage, device) in ((0, "cpu"), (1, "none"))
    for text in ranks.run(leave_ranks_out, 2, str(swap_path), stage, device):
        assert (text == "") == is_whole
        assert is_whole or "no_sync() was expected where every rank keeps whole gradients" in text


def drop_on_one_rank(path: str) -> str:
    """Rank 1 drops the gradients of its first backward; both go on."""
    rank, _, engine = begin_run(path, stage=2)
    try:
        engine.backward(engine(*micro_batches(Case(), 0, rank, 2)[0]))
        if rank == 1:
            engine.zero_grad()
        engine.backward(engine(*micro_batches(Case(), 1, rank, 2)[0]))
        engine.step()
    except tiered_zero.errors.RankError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_ranks_that_keep_sums_of_other_backwards_are_found(ranks: RankPool, swap_path: Path) -> None:
    for text in ranks.run(drop_on_one_rank, 2, str(swap_path)):
        assert "expected in the same order on every rank; rank 0 runs backward 2 after step 0, with" in text
        assert "rank 1 runs backward 2 after step 0, with 0 sums of gradients" in text


class Layer(torch.nn.Linear):
    def forward(self, x: torch.Tensor, trains: bool = True) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight if trains else self.weight.detach())


class Detour(torch.nn.Module):
    """Three layers, a unit each. A rank may leave the second out; or, where every rank gathers the same units
    (`calls_all`), only its gradient."""

    def __init__(self, calls_all: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(Layer(64, 64, bias=False) for _ in range(3))
        self.calls_all = calls_all

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != 1 or uses_all or self.calls_all:
                x = layer(x, index != 1 or uses_all)
        return x


def loss_of(model: Any, rank: int, uses_all: bool) -> torch.Tensor:
    loss: torch.Tensor = model(torch.full((2, 64), rank + 1.0), uses_all).square().mean()
    return loss


def zero_gradients(path: str, stage: int, aborts: bool) -> dict[str, torch.Tensor]:
    """The second layer, which rank 0 alone uses, has a gradient; zero_grad(); a step. `aborts`: the layer's gradient is
    of a step that is dropped, and no rank uses it in the next."""
    rank = int(os.environ["RANK"])
    config = small_config(path, stage, "none")
    del config["optimizer"]
    config["tiered_zero"]["unit_size_cap"] = 64 * 64 * 4
    model = Detour(stage == 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    try:
        engine.backward(loss_of(engine, rank, rank == 0))
        if aborts:
            engine.abort_step()
        engine.zero_grad(set_to_none=False)
        engine.backward(loss_of(engine, rank, rank == 0 and not aborts))
        engine.step()
        return {name: value.clone() for name, value in engine.module.state_dict().items()}
    finally:
        engine.close()


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_grad_leaves_nothing_of_a_unit_that_one_rank_used(
    ranks: RankPool, swap_path: Path, stage: int, aborts: bool
) -> None:
    """Of that layer the other rank has no gradient, but a shard of the sum."""
    model = Detour(stage == 3)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: torch.zeros_like(value) for name, value in expected.items()}
    for rank in range(2):
        model.zero_grad()
        loss_of(model, rank, rank == 0 and not aborts).backward()  # type: ignore[no-untyped-call]
        for name, param in model.named_parameters():
            averages[name] += 0 if param.grad is None else param.grad / 2
    for found in ranks.run(zero_gradients, 2, str(swap_path), stage, aborts):
        for name, value in found.items():
            assert torch.equal(value, expected[name].add(averages[name], alpha=-0.1)), name


def layers(num: int = 4) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(num)))


def small_config(path: str, stage: int, device: str, **more: Any) -> dict[str, Any]:
    offload = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "offload_optimizer": offload, **more.pop("zero", {})},
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60},
        "gradient_clipping": 0,
        **more,
    }


def train_layers(config: dict[str, Any], num_steps: int, accumulation: int) -> dict[str, Any]:
    """What the plan and the ledger say."""
    rank = int(os.environ["RANK"])
    engine, *_ = tiered_zero.initialize(model=layers(), config=config)
    for step in range(num_steps * accumulation):
        rows = torch.randn(2, 128, generator=torch.Generator().manual_seed(10 * step + rank))
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(rows.to(dtype)).float().square().mean())
        engine.step()
    found = {
        "kinds": {tier: {kind: row["peak"] for kind, row in kinds.items()} for tier, kinds in
                  engine.memory_report().items()},
        "plan": {(row.tier, row.kind): row.nbytes for row in engine.plan.rows},
        "units": [unit.numel for unit in units(engine)],
    }  # fmt: skip
    engine.close()
    return found


@pytest.mark.parametrize(
    ("world", "stage", "device", "precision", "accumulation"),
    [
        (2, 0, "cpu", "fp32", 1),
        (4, 0, "none", "bf16", 2),
        (4, 1, "none", "fp32", 1),
        (2, 1, "cpu", "fp32", 2),
        (2, 2, "nvme", "bf16", 2),
        (4, 2, "none", "bf16", 1),
    ],
)
def test_the_memory_of_a_rank_follows_the_formulas(
    ranks: RankPool, swap_path: Path, world: int, stage: int, device: str, precision: str, accumulation: int
) -> None:
    """Bytes an element: parameters 2 or 4, gradients as many or 4 where they are summed, masters and state 12."""
    more = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    config = small_config(str(swap_path), stage, device, gradient_accumulation_steps=accumulation, **more)
    param = 2 if precision == "bf16" else 4
    grad = 4 if accumulation > 1 else param
    divides_state, divides_gradients = stage > 0, stage > 1 or (stage == 1 and device != "none")
    tier, grad_tier = ("device", "device") if device == "none" else ("host" if device == "cpu" else device, "host")
    for found in ranks.run(train_layers, world, config, 1, accumulation):
        kinds, sizes = found["kinds"], found["units"]
        numel = sum(sizes)
        assert kinds["device"]["param"] == param * numel
        assert kinds[grad_tier]["gradient"] == grad * numel // (world if divides_gradients else 1)
        assert kinds[tier]["state"] == 12 * numel // (world if divides_state else 1)
        others = numel - numel // world
        assert kinds["host"]["bucket"] == 2 * 4 * (numel + others), "small units share one bucket"
        waiting = param * numel if divides_gradients else param * max(sizes) if grad_tier == "host" else 0
        assert kinds["device"].get("gradient_in_flight", 0) <= waiting
        assert found["plan"].get(("device", "gradient_in_flight"), 0) == waiting
        for where, row in kinds.items():
            for kind, peak in row.items():
                assert peak <= found["plan"].get((where, kind), 0), (where, kind)


def watch_backward(config: dict[str, Any]) -> dict[str, float]:
    """When the first reduction ended, and when backward came to the first layer."""
    engine, *_ = tiered_zero.initialize(model=layers(6), config=config)
    recorder(engine).keep_spans = True
    times: dict[str, float] = {}
    out = engine(torch.ones(2, 128))
    first = engine.module[0].weight  # its gradient is the last
    first.register_hook(lambda grad: times.update(first_layer=time.perf_counter()))
    engine.backward(out.square().mean())
    engine.step()
    spans = [span for span in recorder(engine).take_spans() if span.lane == "reduce_scatter"]
    engine.close()
    return {**times, "first_end": min(span.end_s for span in spans), "count": len(spans)}


def test_reductions_run_under_backward(ranks: RankPool, swap_path: Path) -> None:
    """A bucket's memory is used again once it is reduced, so the third bucket waits for the first: long before the last
    gradient comes."""
    config = small_config(str(swap_path), 2, "none", zero={"reduce_bucket_size": 4096})
    for found in ranks.run(watch_backward, 2, config):
        assert found["count"] >= 12
        assert found["first_end"] < found["first_layer"]
