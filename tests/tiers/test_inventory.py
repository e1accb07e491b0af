"""The table of what rests where."""

from __future__ import annotations

import pytest
import torch

from tests.support.tier_rig import make_runtime
from tests.support.units import make_unit
from tiered_zero.layout.subgroups import cut_subgroups
from tiered_zero.tiers.tier import DeviceTier, Home, Inventory, UnitUpdate, own_bytes


def test_homes_are_found_by_owner_and_kind() -> None:
    runtime = make_runtime()
    tier = DeviceTier(runtime.accelerator, runtime.ledger)
    unit, other = make_unit(0), make_unit(1)
    (subgroup,) = cut_subgroups([unit], {"u0.p0": 0}, 1 << 20, elementwise=True)
    inventory = Inventory()
    owners = [(unit, "param"), (unit, "gradient"), (other, "param"), (subgroup, "param")]
    homes = {}
    for number, (owner, kind) in enumerate(owners):
        homes[number] = Home(tier, tier.reserve(str(number), 4096, kind))
        inventory.place(owner, kind, homes[number])
    for number, (owner, kind) in enumerate(owners):
        assert inventory.home(owner, kind) is homes[number]
        assert homes[number].start == 0, "one rank owns the whole flat"
    assert inventory.find(subgroup, "state") is None
    assert inventory.find(make_unit(0), "param") is None, "a unit equals only itself"
    with pytest.raises(AssertionError, match="has a home already"):
        inventory.place(unit, "param", homes[1])
    with pytest.raises(AssertionError, match="nothing rests as state"):
        inventory.home(unit, "state")
    runtime.accelerator.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_home_holds_a_shard(rank: int) -> None:
    runtime = make_runtime()
    tier = DeviceTier(runtime.accelerator, runtime.ledger)
    unit = make_unit(0, [5000, 300], world_size=2)
    shard = unit.shard(rank)
    home = Home(tier, tier.reserve("0", unit.shard_nbytes, "param"), shard.start)
    assert home.elements(unit) == slice(shard.start, shard.stop) and unit.shard_nbytes == 4 * len(shard)
    flat = torch.arange(unit.numel, dtype=unit.dtype)
    own_bytes(home.slot).copy_(flat[shard.start : shard.stop].view(torch.uint8))
    subgroups = cut_subgroups([unit], {"u0.p0": 0, "u0.p1": 0}, 1, elementwise=True, rank=rank)
    assert len(subgroups) > 1
    for segment in (segment for subgroup in subgroups for segment in subgroup.segments):
        values = home.view_of(segment)
        assert values is not None and torch.equal(values, segment.part_of(flat))
        assert home.offset_of(segment) == 4 * (segment.unit_start - shard.start)
    runtime.accelerator.close()


def test_the_last_update_of_a_unit_is_found() -> None:
    inventory, unit = Inventory(), make_unit(0)
    assert inventory.last_update(unit) is None
    unit_updates = [UnitUpdate(), UnitUpdate()]
    for unit_update in unit_updates:
        inventory.set_last_update(unit, unit_update)
        assert inventory.last_update(unit) is unit_update
    assert inventory.last_update(make_unit(1)) is None
