"""Masters outside of a step: first values, and what follows a change by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fakes.tier_rig import TIERS, open_rig
from tests.fakes.units import flat_of, make_params, make_unit
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import cut_subgroups
from tiered_zero.layout.swap_bytes import CUT_NUMEL
from tiered_zero.optim.masters import Masters
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.optim.torch_rule import TorchRule
from tiered_zero.tiers.inventory import Home, Inventory


@dataclass
class World:
    """Two bf16 units cut at every page's worth, and one that no sub-group holds."""

    masters: Masters
    units: list[Unit]
    values: list[torch.Tensor]


@pytest.fixture(params=TIERS)
def world(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[World]:
    units = [make_unit(index, [3000, 50, CUT_NUMEL], torch.bfloat16) for index in range(2)]
    units.append(make_unit(2, [100], torch.bfloat16, trainable=False))
    group_of = {entry.param.name: 0 for unit in units for entry in unit.entries}
    rule = TorchRule(torch.optim.AdamW, {"lr": 0.1})
    groups = torch.optim.AdamW([torch.zeros(1)], lr=0.1).param_groups
    with open_rig(request.param, swap_path, buffer_nbytes=4096, num_buffers=1) as rig:
        inventory = Inventory()
        layouts = [StateLayout(subgroup, rule, groups) for subgroup in cut_subgroups(units, group_of, CUT_NUMEL, True)]
        for layout in layouts:
            slot = rig.tier.reserve(f"s{layout.subgroup.index}", layout.nbytes, "state")
            inventory.place(layout.subgroup, "state", Home(rig.tier, slot))
        masters = Masters(layouts, inventory, rig.staging)
        values = [torch.randn(unit.numel) * (flat_of(unit, make_params(unit)) != 0) for unit in units]
        for unit, value in zip(units, values, strict=True):
            masters.store(unit, value)
        yield World(masters, units, values)


def test_what_was_stored_is_read_across_all_cuts(world: World) -> None:
    for unit, value in zip(world.units[:2], world.values, strict=False):
        assert torch.equal(world.masters.read(unit), value)
    assert torch.equal(world.masters.read(world.units[2]), torch.zeros(world.units[2].numel)), "held by nobody"


def test_an_unchanged_parameter_keeps_its_masters_full_precision(world: World) -> None:
    unit, value = world.units[0], world.values[0]
    world.masters.follow(unit, value.to(torch.bfloat16))
    assert torch.equal(world.masters.read(unit), value)


def test_what_was_set_by_hand_is_taken_over_element_by_element(world: World) -> None:
    unit, value = world.units[1], world.values[1]
    flat = value.to(torch.bfloat16)
    changed = torch.zeros(unit.numel, dtype=torch.bool)
    changed[[0, 7, 2999, CUT_NUMEL - 1, CUT_NUMEL, unit.entries[2].start + 5]] = True
    flat[changed] = 42.0
    world.masters.follow(unit, flat)
    found = world.masters.read(unit)
    assert torch.equal(found[changed], torch.full((int(changed.sum()),), 42.0))
    assert torch.equal(found[~changed], value[~changed])
    assert torch.equal(found.to(torch.bfloat16), flat), "the invariant: a parameter is its master, rounded"
    assert torch.equal(world.masters.read(world.units[0]), world.values[0]), "nobody else's"


def test_a_nan_set_by_hand_is_taken_over_too(world: World) -> None:
    unit, value = world.units[0], world.values[0]
    flat = value.to(torch.bfloat16)
    flat[3] = float("nan")
    world.masters.follow(unit, flat)
    found = world.masters.read(unit)
    assert found[3].isnan() and torch.equal(found[4:], value[4:])
