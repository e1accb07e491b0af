"""What rests where: the slots of units, sub-groups and durable copies, on the tiers that the plan says."""

from __future__ import annotations

import torch

from tiered_zero.checkpoint.commit import Commits
from tiered_zero.checkpoint.commit_layout import run_fingerprint
from tiered_zero.checkpoint.copies import DurableCopies
from tiered_zero.checkpoint.portable import RunState
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.placement import back_tier
from tiered_zero.run_spec import RunSpec
from tiered_zero.tiers.inventory import Home, Inventory
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.rack import TierRack


def place_homes(run_spec: RunSpec, tiers: TierRack) -> Inventory:
    """Reserve a slot for each unit and each sub-group, on the tiers that the plan says."""
    plan, inventory = run_spec.plan, Inventory()
    stepped = {segment.unit.index for layout in run_spec.layouts for segment in layout.subgroup.segments}
    commits = run_spec.commits
    durable = set() if commits is None else {unit.index for unit in commits.durable_homes}
    for unit in run_spec.units:
        tier = tiers.for_params(plan.tiers.params[unit.index])
        if tier is not None:
            slot = tier.reserve(f"param/{unit.index}", unit.nbytes, "param", committed=unit.index in durable)
            inventory.place(unit, "param", Home(tier, slot))
        back = tiers.for_params(back_tier(plan.tiers.params[unit.index]))
        if plan.delayed and unit.index in stepped and back is not None:
            kind = "param_back"
            slot = back.reserve(f"{kind}/{unit.index}", unit.nbytes, kind, committed=unit.index in durable)
            inventory.place(unit, kind, Home(back, slot))
    for layout in run_spec.layouts:
        tier = tiers.for_state(plan.tiers.state[layout.subgroup.index])
        name = f"state/{layout.subgroup.index}"
        slot = tier.reserve(name, layout.nbytes, "state", committed=commits is not None)
        inventory.place(layout.subgroup, "state", Home(tier, slot))
    return inventory


def reserve_copies(run_spec: RunSpec, tiers: TierRack, state: RunState) -> DurableCopies | None:
    """Reserve room in the state's store for what no committed slot holds; None without in-place commits."""
    commits, request = run_spec.commits, run_spec.plan.request.commits
    if commits is None or request is None:
        return None
    tier = tiers.for_state("nvme")

    def reserve(name: str, nbytes: int) -> Home:
        return Home(tier, tier.reserve(name, nbytes, "commit_copy", committed=True))

    units = {unit.index: (unit, reserve(f"copy/{unit.index}", unit.nbytes)) for unit in commits.copied}

    def flat(unit: Unit) -> torch.Tensor:
        home = state.inventory.find(unit, "param")
        view = state.param_flat(unit) if home is None else home.tier.view(home.slot)
        assert view is not None, "copied units rest in memory"
        return view

    buffers = reserve("buffers", request.buffers_nbytes) if request.buffers_nbytes else None
    return DurableCopies(units, flat, buffers)


def make_commits(run_spec: RunSpec, tiers: TierRack, state: RunState, copies: DurableCopies | None) -> Commits | None:
    config, plan = run_spec.config, run_spec.plan
    if copies is None or run_spec.commits is None:
        return None
    found = [tiers.for_state("nvme"), *([tiers.for_params("nvme")] if plan.nbytes("nvme", "commit_param") else [])]
    stores = [tier for tier in dict.fromkeys(found) if isinstance(tier, NvmeTier)]
    return Commits(state, stores, copies, run_fingerprint(config, plan, run_spec.commits, run_spec.layouts))
