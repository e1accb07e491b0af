"""Reads and changes of sharded parameters between steps: calls that every rank makes, with the values of one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.training import Case, begin_run, differences, micro_batches, rank_and_config
from tests.support.inspection.insides import offloaded
from tiered_zero.errors import BudgetError, ParameterOffloadedError


def change_weights(path: str, zero: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 sets a weight, rank 0 loads a layer, both evaluate; then one more step."""
    zero = {
        **zero,
        **({"offload_param": {**zero["offload_param"], "nvme_path": path}} if "offload_param" in zero else {}),
    }
    rank, model, engine = begin_run(path, **zero)
    batches = [micro_batches(Case(), step, rank, 2)[0] for step in range(2)]
    engine.backward(engine(*batches[0]))
    engine.step()
    with tiered_zero.zero.GatheredParameters(model.norm.weight, modifier_rank=1), torch.no_grad():
        if rank == 1:
            model.norm.weight.fill_(0.5)
    loaded = {name: value + 0.25 * (rank + 1) for name, value in model.sometimes.state_dict().items()}
    model.sometimes.load_state_dict(loaded)
    with tiered_zero.gathered(model.sometimes):
        bias = model.sometimes.bias.detach().clone()
    with torch.no_grad():
        loss = engine(*micro_batches(Case(), 7, 0, 2)[0])
    copied = copy.deepcopy(model.blocks[0]).state_dict()
    engine.backward(engine(*batches[1], detour=True))
    engine.step()
    found = {
        "bias": bias, "expected bias": loaded["bias"], "loss": loss.item(), "copied": copied,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }  # fmt: skip
    if zero["stage"] == 3:
        with pytest.raises(ParameterOffloadedError, match="gathered"):
            model.norm.weight + 1
        with (
            patch.object(offloaded, "available_host_nbytes", lambda: 1 << 10 if rank else 1 << 40),
            pytest.raises(BudgetError, match=r"state_dict\(\) makes a whole copy .* found 512 B of host memory"),
        ):
            model.state_dict()
        assert differences(found["weights"], dict(model.state_dict())) == []
        engine.save_16bit_model(path + "/weights", max_shard_size=30_000)
    engine.close()
    return found


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_changes_by_hand_are_those_of_whole_weights(ranks: RankPool, swap_path: Path, device: str) -> None:
    whole = ranks.run(change_weights, 2, str(swap_path), {"stage": 1})
    offload = {"offload_param": {"device": device, "max_in_cpu": 0}} if device != "none" else {}
    for rank, found in enumerate(ranks.run(change_weights, 2, str(swap_path), {"stage": 3, **offload})):
        assert torch.equal(found["bias"], whole[0]["expected bias"]), "rank 0's, on every rank"
        assert found["loss"] == whole[rank]["loss"]
        assert differences(found["copied"], whole[rank]["copied"]) == []
        assert differences(found["weights"], whole[rank]["weights"]) == []
    (index,) = (swap_path / "weights").glob("*.index.json")
    for name, file in json.loads(index.read_text())["weight_map"].items():
        assert torch.equal(load_file(index.parent / file)[name], whole[0]["weights"][name]), name
    assert [path.name for path in swap_path.iterdir()] == ["weights"]


def load_with_little_room(path: str) -> dict[str, Any]:
    """There is room for few units, and gloo lets go of none that it has broadcast."""
    lazy = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    rank, config = rank_and_config(path, stage=3, offload_param={"device": "cpu"}, **lazy)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    weights = {name: value + 1 + rank for name, value in model.state_dict().items()}
    held, broadcast = [], dist.broadcast

    def broadcast_and_hold(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append(tensor)
        return broadcast(tensor, *args, **kwargs)

    with patch.object(dist, "broadcast", broadcast_and_hold):
        model.load_state_dict(weights)
    assert len(held) >= 8, "those of gathers too"
    found = {"loaded": weights, "weights": dict(model.state_dict())}
    engine.close()
    return found


def test_loading_takes_no_more_room_than_a_block(ranks: RankPool, swap_path: Path) -> None:
    """What gloo's threads still hold of a unit counts as no view of it: its memory is free for the next one."""
    first, second = ranks.run(load_with_little_room, 2, str(swap_path))
    assert differences(first["weights"], first["loaded"]) == [], "rank 0's, on every rank"
    assert differences(first["weights"], second["weights"]) == []


def start_on_meta(path: str) -> dict[str, Any]:
    """Values are drawn unit by unit, by each rank its own; all get rank 0's."""
    rank, config = rank_and_config(path, stage=3, offload_param={"device": "cpu"})
    torch.manual_seed(40 + rank)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    engine, *_ = tiered_zero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    engine.backward(engine(torch.full((2, 64), 1.0 + rank)).sum())
    engine.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    engine.close()
    return weights


def test_a_model_on_meta_has_the_values_of_rank_0(ranks: RankPool, swap_path: Path) -> None:
    first, second = ranks.run(start_on_meta, 2, str(swap_path))
    assert differences(first, second) == []
    torch.manual_seed(40)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halves: dict[str, torch.Tensor] = {}
    for rank in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 64), 1.0 + rank)).sum().backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            halves[name] = halves[name] + param.grad / 2 if rank else param.grad / 2
    for name, param in model.named_parameters():
        param.grad = halves[name]
    optimizer.step()
    assert differences(first, dict(model.state_dict())) == []
