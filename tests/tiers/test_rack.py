"""The tiers of a run without an engine, and what is left of them on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.inspection.insides import load_manifests, specify_run
from tests.support.tier_rig import make_runtime, random_bytes
from tiered_zero.concurrency.interrupts import Teardown
from tiered_zero.config.load import load
from tiered_zero.sizes import PAGE_NBYTES
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.rack import TierRack


def open_rack(swap_path: Path, resources: Teardown) -> TierRack:
    offload = {"device": "nvme", "nvme_path": str(swap_path)}
    config = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "offload_param": {**offload, "max_in_cpu": 0},
                "offload_optimizer": offload,
            },
            "tiered_zero": {"device": "cpu"},
        }
    )
    model = torch.nn.Linear(64, 64)
    run_spec = specify_run(config, model, torch.optim.AdamW(model.parameters()))
    runtime = make_runtime()
    resources.add("tiers", runtime.accelerator.close)
    return TierRack(config, run_spec.plan, runtime, resources, model_name="Linear")


@pytest.mark.usefixtures("no_leaks")
def test_a_rack_moves_bytes_without_an_engine_and_leaves_nothing(swap_path: Path) -> None:
    resources = Teardown(("tiers",))
    rack = open_rack(swap_path, resources)
    tier = rack.tier("nvme", "state")
    assert isinstance(tier, NvmeTier) and tier is rack.tier("nvme", "param")
    assert rack.tier("device", "param") is rack.device and rack.tier("host", "param") is rack.host
    slot = tier.reserve("state/0", PAGE_NBYTES, "state")
    data = random_bytes(PAGE_NBYTES)
    assert rack.state_staging is not None
    with rack.state_staging.lease(PAGE_NBYTES) as lease:
        lease.tensor.copy_(data)
        tier.write(slot, lease.tensor).wait()
        lease.tensor.zero_()
        tier.read(slot, lease.tensor).wait()
        assert torch.equal(lease.tensor, data)
    rack.drain()
    resources.close()
    assert list(swap_path.iterdir()) == []


@pytest.mark.usefixtures("no_leaks")
def test_a_directory_with_a_commit_is_released_not_removed(swap_path: Path) -> None:
    resources = Teardown(("tiers",))
    rack = open_rack(swap_path, resources)
    tier = rack.nvme["state"]
    tier.store.commit(7, {})
    resources.close()
    (path,) = swap_path.iterdir()
    committed, prepared = load_manifests(path)
    assert committed is not None and committed.step == 7 and prepared is None
