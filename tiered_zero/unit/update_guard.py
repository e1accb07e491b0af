"""Keep units from being used while the update changes them, and make them whole after an update of shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from tiered_zero.concurrency.transfer import Transfer, wait_all
from tiered_zero.errors import ModelError
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.telemetry.spans import Recorder
from tiered_zero.tiers.inventory import Home, Inventory, Owner
from tiered_zero.tiers.unit_update import UnitUpdate
from tiered_zero.unit.param_changes import ParamChanges
from tiered_zero.unit.unit_cache import UnitCache
from tiered_zero.unit.unit_state import PagedUnit, UnitState, UnitTable, WeightState


@final
@dataclass(eq=False, repr=False)
class UpdateGuard:
    """Invalidates and blocks units, and waits for their updates. The update policy calls this, on the driver thread.

    `_swapped`: the homes of units after the next `swap_param_buffers`.
    """

    _units: UnitTable
    _cache: UnitCache
    _changes: ParamChanges
    _inventory: Inventory
    _recorder: Recorder
    _swapped: dict[tuple[Owner, str], Home] = field(default_factory=dict, init=False)

    def invalidate(self) -> None:
        """Drop what the device holds of trainable units, whose homes are about to change.

        A storage that is still viewed keeps its memory, without values, and is read again in place at the next use.
        """
        for paged in self._units.by_index.values():
            if paged.unit.trainable:
                self._invalidate(paged)
        self._changes.refuse()

    def invalidate_all(self) -> None:
        """Drop what the device holds of every unit, frozen ones too: all of them are about to be loaded.

        A frozen unit that lives on the device is the script's to change at any time."""
        for paged in self._units:
            if paged.unit.trainable or not paged.is_resident:
                self._invalidate(paged)
            else:
                paged.renew()
        self._changes.refuse()

    def _invalidate(self, paged: PagedUnit) -> None:
        paged.renew()
        if paged.is_resident:
            self._changes.look(paged)
            return
        if paged.num_users:
            raise ModelError(
                f"Unit {paged.unit.name} is in use by tiered_zero.gathered() while a step is about to change it. Leave "
                "the `with` block before step()."
            )
        self._cache.evict(paged)
        if paged.storage.is_full:  # other code holds a view of it
            paged.storage.blank()

    def end_update(self) -> None:
        """Watch resident units that are in use for changes by hand from here on: they have their new values."""
        for paged in self._units.by_index.values():
            if paged.is_resident and paged.state is UnitState.IN_USE:
                paged.storage.watch.begin()

    def begin_back_update(self) -> None:
        """Note the swap that ends a delayed update, which writes the "param_back" homes while compute reads the "param"
        homes."""
        find, units = self._inventory.find, [paged.unit for paged in self._units if not paged.is_resident]
        homes = [(unit, back, find(unit, "param")) for unit in units if (back := find(unit, "param_back")) is not None]
        self._swapped = {(unit, "param"): back for unit, back, _ in homes}
        self._swapped |= {(unit, "param_back"): home for unit, _, home in homes if home is not None}

    def swap_param_buffers(self) -> None:
        """Swap the two homes of each unit; of one that lives on the device the back home is copied there. Where this
        fails it is called again."""
        self.invalidate()
        for paged in self._units:
            if paged.is_resident and (back := self._inventory.find(paged.unit, "param_back")) is not None:
                back.tier.fetch(back.slot, paged.storage.flat).wait()
        self._inventory.move(self._swapped)
        self.end_update()

    def block_for_update(self) -> None:
        """Block use of every trainable unit until its own update completes. The step is taken."""
        begun = {paged for paged in self._units if paged.weights is WeightState.UPDATING}
        self.unblock()
        for paged in self._units:
            if not paged.unit.trainable or paged in begun:
                continue  # what was fetched of those since waits for their updates, which may wait for this step
            self._invalidate(paged)
            if paged.is_resident:
                self._cache.guard(paged)
        self._changes.refuse()

    def block_unit_for_update(self, unit: Unit) -> bool:
        """Refuse use of a unit, whose update begins in backward, until the step is taken. False, with nothing done,
        while it is in use."""
        paged = self._units.by_index[unit.index]
        if paged.storage.is_viewed or (paged.num_users and not paged.is_resident):
            return False
        if paged.is_resident:
            self._cache.guard(paged)
        else:
            self._cache.evict(paged)
        paged.renew()
        paged.block()
        return True

    def unblock(self) -> None:
        """Allow use of units that `block_unit_for_update` has blocked: their updates were dropped before they began, or
        the step is taken."""
        for paged in self._units:
            paged.unblock()

    def wait(self, unit: Unit, unit_update: UnitUpdate, until_written: bool) -> None:
        """Block until `unit_update`, the unit's last one, is in its home, where `until_written`; else until its new
        parameters are computed: its gradients are not needed any more, and a fetch knows how they come to the device.
        Raises what made that fail, in so far as it has by then."""
        if not unit_update.written.done():
            with self._recorder.span("compute", "wait_update", unit.name):
                (unit_update.written if until_written else unit_update.computed).wait()
        elif until_written:
            unit_update.written.wait()  # done: returns at once, or raises


@final
class ShardGather:
    """Makes whole units of shards, in place: so weights are whole between steps, and one rank alone may evaluate or
    save them. Driver thread.

    A unit is gathered where it rests, without memory beside it however large it is. `units`: those that the optimizer
    steps, in static order. `flat_of`: a unit's flat [P], on the device.
    """

    def __init__(self, runtime: Runtime, units: Sequence[Unit], flat_of: Callable[[Unit], torch.Tensor]) -> None:
        self._accelerator = runtime.accelerator
        self._collectives, self._recorder = runtime.collectives, runtime.recorder
        self.units = units
        self._flat_of = flat_of

    def gather(self) -> None:
        """Gather every unit: shards were changed otherwise than by a step. Blocks; raises RankError."""
        with self._recorder.span("compute", "wait_param"):
            wait_all([self.start(unit) for unit in self.units])

    def start(self, unit: Unit) -> Transfer:
        """Start to fill the unit with every rank's shard, of which this rank's has its new values."""
        flat = self._flat_of(unit).data  # with a version counter of its own: views that autograd saved stay valid
        shard = unit.shard(self._collectives.rank)
        own, name = flat[shard.start : shard.stop], f"the parameters of {unit.name}"
        after = [self._accelerator.record_compute()]  # what may still read the shards of before
        return self._collectives.all_gather(flat, own, name, after=after, bounds=unit.bounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeWeights:
    """Makes the parameters of every unit whole once this rank has written its shards of them, and guards them while
    they change. `gather`: None where the shards are all, or are gathered for each use."""

    guard: UpdateGuard
    gather: ShardGather | None

    def invalidate_all(self) -> None:
        """Drop what the device holds of every unit."""
        self.guard.invalidate_all()

    def end_update(self) -> None:
        """Gather the other ranks' shards, and take the values of resident units as new."""
        if self.gather is not None:
            self.gather.gather()
        self.guard.end_update()
