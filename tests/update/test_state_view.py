"""Masters outside of a step: first values, and what follows a change by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.inspection.insides import Home, Inventory
from tests.support.tier_rig import TIERS, open_rig
from tests.support.units import flat_of, make_params, make_unit
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.layout.flat import CUT_NUMEL, Unit
from tiered_zero.layout.subgroups import cut_subgroups
from tiered_zero.rules.native_rules import AdamRule
from tiered_zero.rules.state_layout import FullMasters, RemainderMasters, StateLayout
from tiered_zero.update.state_view import ParamShards, StateView


@dataclass
class World:
    """Two bf16 units cut at every page's worth, and one that no sub-group holds."""

    view: StateView
    units: list[Unit]
    values: list[torch.Tensor]
    params: list[torch.Tensor]

    def follow(self, index: int, flat: torch.Tensor) -> None:
        self.view.follow(self.units[index], flat, self.params[index])
        self.params[index] = flat

    def read(self, index: int) -> torch.Tensor:
        return self.view.read_masters(self.units[index], self.params[index])


@pytest.fixture(params=itertools.product(TIERS, ("full", "remainder")), ids="-".join)
def world(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[World]:
    place, how = request.param
    units = [make_unit(index, [3000, 50, CUT_NUMEL], torch.bfloat16) for index in range(2)]
    units.append(make_unit(2, [100], torch.bfloat16, trainable=False))
    group_of = {entry.param.name: 0 for unit in units for entry in unit.entries}
    rule = AdamRule(decoupled=True, kernel=None)
    groups = torch.optim.AdamW([torch.zeros(1)], lr=0.1).param_groups
    masters_as = RemainderMasters() if how == "remainder" else FullMasters()
    with open_rig(place, swap_path, buffer_nbytes=4096, num_buffers=1) as rig:
        inventory = Inventory()
        subgroups = cut_subgroups(units, group_of, CUT_NUMEL, elementwise=True)
        layouts = [StateLayout(subgroup, rule, groups, masters_as) for subgroup in subgroups]
        for layout in layouts:
            slot = rig.tier.reserve(f"s{layout.subgroup.index}", layout.nbytes, "state")
            inventory.place(layout.subgroup, "state", Home(rig.tier, slot))
        shards = ParamShards(Collectives(), units, frozenset(), is_sharded=False)
        view = StateView(layouts, rule, inventory, rig.staging, groups, {}, shards)
        values = [torch.randn(unit.numel) * (flat_of(unit, make_params(unit)) != 0) for unit in units]
        for unit, value in zip(units, values, strict=True):
            value.view(torch.int32)[::5].bitwise_and_(-0x10000).bitwise_or_(0x8000)  # ties
            view.store_masters(unit, value)
        yield World(view, units, values, [value.to(torch.bfloat16) for value in values])


def test_what_was_stored_is_read_across_all_cuts(world: World) -> None:
    for index, value in enumerate(world.values[:2]):
        assert torch.equal(world.read(index), value)
    assert torch.equal(world.read(2), torch.zeros(world.units[2].numel)), "in no sub-group"


def test_an_unchanged_parameter_keeps_its_masters_full_precision(world: World) -> None:
    world.follow(0, world.values[0].to(torch.bfloat16))
    assert torch.equal(world.read(0), world.values[0])


def test_what_was_set_by_hand_is_taken_over_element_by_element(world: World) -> None:
    unit, value = world.units[1], world.values[1]
    flat = value.to(torch.bfloat16)
    changed = torch.zeros(unit.numel, dtype=torch.bool)
    changed[[0, 5, 7, 2999, CUT_NUMEL - 1, CUT_NUMEL, unit.entries[2].start + 5]] = True
    flat[changed] = 42.0
    world.follow(1, flat)
    found = world.read(1)
    assert torch.equal(found[changed], torch.full((int(changed.sum()),), 42.0))
    assert torch.equal(found[~changed], value[~changed])
    assert torch.equal(found.to(torch.bfloat16), flat), "the invariant: a parameter is its master, rounded"
    assert torch.equal(world.read(0), world.values[0]), "of no other unit"


def test_a_nan_set_by_hand_is_taken_over_too(world: World) -> None:
    flat = world.values[0].to(torch.bfloat16)
    flat[3] = float("nan")
    world.follow(0, flat)
    found = world.read(0)
    assert found[3].isnan() and torch.equal(found[4:], world.values[0][4:])
