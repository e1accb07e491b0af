"""What a test must look at inside an engine, kept in one place."""

from __future__ import annotations

from typing import Any

import torch

import tiered_zero
from tiered_zero.layout.flat import Unit
from tiered_zero.tiers.device import DeviceTier
from tiered_zero.tiers.host import HostTier
from tiered_zero.tiers.nvme import NvmeTier
from tiered_zero.tiers.slots import read_slot
from tiered_zero.tiers.tier import HostBuffer, Slot
from tiered_zero.update.masters import Masters


def everything(engine: tiered_zero.Engine) -> dict[str, Any]:
    """Weights, learning rates, and of the update: masters and state bit by bit, step counts."""
    found: dict[str, Any] = dict(engine.module.state_dict())  # first: it waits for an update that is still running
    found["lr"] = engine.get_lr()
    found["scheduler"] = engine.lr_scheduler.last_epoch if engine.lr_scheduler else None
    stepper, inventory = engine._parts.policy._stepper, engine._parts.pager._inventory
    for (index, piece), scalars in stepper._scalars.items():
        found[f"scalars {index}.{piece}"] = {name: float(value) for name, value in scalars.items()}
    for layout in stepper._layouts:
        index = layout.subgroup.index
        nbytes = layout.nbytes if index in stepper._born else layout.master_nbytes
        found[f"state {index}"] = read_slot(
            inventory.home(layout.subgroup, "state"), 0, nbytes, stepper._passage._staging
        )
    return found


def masters(engine: tiered_zero.Engine) -> dict[str, torch.Tensor]:
    """Unit -> its fp32 masters, in whatever format they rest."""
    engine.flush()
    stepper, pager = engine._parts.policy._stepper, engine._parts.pager
    found = Masters(stepper._layouts, stepper._passage._inventory, stepper._passage._staging)
    values: dict[str, torch.Tensor] = {}
    for residency in pager._residencies.values():
        unit = residency.unit
        if unit.trainable:
            params = residency.storage.flat if pager.is_device_resident(unit) else pager.keeper.read(unit)
            values[f"{unit.index} {unit.name}"] = found.read(unit, params)
    return values


def unverified_nbytes(engine: tiered_zero.Engine, category: str) -> int:
    """Bytes read from swap files that no checksum covered, of "param" or "state"."""
    tiers = {home.tier for home in engine._parts.pager._inventory.homes() if isinstance(home.tier, NvmeTier)}
    return sum(tier._store.nbytes_unverified.get(category, 0) for tier in tiers)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not the same to the bit."""
    assert before.keys() == after.keys()
    return [name for name in before if not _same(before[name], after[name])]


def _same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


def param_slots(engine: tiered_zero.Engine) -> dict[str, Unit]:
    """Slot name -> unit, of the units whose parameters rest off the device."""
    pager = engine._parts.pager
    found = [(pager._inventory.find(r.unit, "param"), r.unit) for r in pager._residencies.values()]
    return {home.slot.name: unit for home, unit in found if home is not None}


class Traffic:
    """Counts what goes through the tiers while it is installed (`monkeypatch` takes it off): slot name -> times."""

    def __init__(self, monkeypatch: Any) -> None:
        self.fetched: dict[str, int] = {}
        self.written: dict[str, int] = {}
        for tier in (DeviceTier, HostTier, NvmeTier):
            monkeypatch.setattr(tier, "fetch", self._counting(tier.fetch, self.fetched))
            monkeypatch.setattr(tier, "write", self._counting(tier.write, self.written))

    def _counting(self, method: Any, counts: dict[str, int]) -> Any:
        def counted(tier: Any, slot: Slot, data: HostBuffer, *args: Any) -> Any:
            counts[slot.name] = counts.get(slot.name, 0) + 1
            return method(tier, slot, data, *args)

        return counted

    def clear(self) -> None:
        self.fetched.clear()
        self.written.clear()
