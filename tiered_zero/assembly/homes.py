"""Homes of a run: the slots of units, sub-groups and durable copies, on the tiers that the plan says."""

from __future__ import annotations

import torch

from tiered_zero.assembly.run_spec import RunSpec
from tiered_zero.checkpoint.in_place import Commits, DurableCopies, run_fingerprint
from tiered_zero.checkpoint.run_state import RunState
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.slots import BUFFERS
from tiered_zero.tiers.inventory import Home, Inventory
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.rack import TierRack


def place_homes(run_spec: RunSpec, tiers: TierRack) -> tuple[Inventory, dict[int, Home]]:
    """Reserve the slots of the run's list. Returns those of units (or of this rank's shards) and sub-groups, and those
    of durable copies by the index of their unit."""
    plan, inventory, copies = run_spec.plan, Inventory(), {}
    starts = {index: run_spec.units[index].shard(plan.request.ranks.rank).start for index in plan.tiers.sharded}
    for slot in run_spec.slots:
        of_param = slot.kind in ("param", "param_back")
        tier = tiers.for_params(slot.tier) if of_param else tiers.for_state(slot.tier)
        start = starts.get(slot.index, 0) if of_param or slot.kind == "commit_copy" else 0
        home = Home(tier, tier.reserve(slot.name, slot.nbytes, slot.kind, num_durable=slot.num_durable), start)
        if slot.kind == "commit_copy":
            copies[slot.index] = home
        elif of_param:
            inventory.place(run_spec.units[slot.index], slot.kind, home)
        else:
            inventory.place(run_spec.layouts[slot.index].subgroup, slot.kind, home)
    return inventory, copies


def make_copies(run_spec: RunSpec, homes: dict[int, Home], state: RunState) -> DurableCopies | None:
    """Copy to `homes` what no committed slot holds; None without in-place commits."""
    if run_spec.plan.request.commits is None:
        return None

    def flat(unit: Unit) -> torch.Tensor:
        home = state.inventory.find(unit, "param")
        view = state.param_flat(unit) if home is None else home.tier.view(home.slot)
        assert view is not None, "copied units rest in memory"
        return view

    units = {unit.index: (unit, homes[unit.index]) for unit in run_spec.units if unit.index in homes}
    return DurableCopies(units, state.updated_units, flat, homes.get(BUFFERS))


def make_commits(run_spec: RunSpec, tiers: TierRack, state: RunState, copies: DurableCopies | None) -> Commits | None:
    config, plan = run_spec.config, run_spec.plan
    if copies is None:
        return None
    found = [tiers.for_state("nvme")] if plan.nbytes("nvme", "state") else []
    found += [tiers.for_params("nvme")] if plan.nbytes("nvme", "commit_param") else []
    stores = [tier for tier in dict.fromkeys(found) if isinstance(tier, NvmeTier)]
    return Commits(state, stores, copies, run_fingerprint(config, plan, run_spec.slots, run_spec.layouts))
