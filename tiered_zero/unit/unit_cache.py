"""The units on the device: fetched, prefetched and evicted within the room that the plan leaves them."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import BudgetError
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.plan.planner import PagerLimits
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.unit.driver_thread import CallPhase, Phase
from tiered_zero.unit.guarded_parameter import ClosedEngine
from tiered_zero.unit.param_changes import ParamChanges
from tiered_zero.unit.schedule import Schedule
from tiered_zero.unit.unit_state import PagedUnit, UnitState, UnitTable, WeightState

logger = logging.getLogger("tiered_zero")


@final
class UnitCache:
    """Moves whole units between their homes and the device. The pager alone calls this, on the driver thread.

    [Note: Order of gathers] Where homes hold shards, a fetch is this rank's shard and then a gather of all ranks'. So
    every rank must fetch and evict the same units in the same order: what is decided here depends on the schedule, the
    plan, and the units' states, which acquire and release alone change; never on whether a transfer is done, or on what
    else still holds a view of a unit. Memory that such a view keeps is freed later, and counted against the limit only.
    """

    def __init__(
        self, runtime: Runtime, inventory: Inventory, limits: PagerLimits, units: UnitTable, changes: ParamChanges
    ) -> None:
        self._accelerator = runtime.accelerator
        self._collectives = runtime.collectives
        self._ledger = runtime.ledger
        self._inventory = inventory
        self._limits = limits
        self._units = units
        self._changes = changes
        self.schedule = Schedule()
        self._order: OrderedDict[int, PagedUnit] = OrderedDict()
        """Paged units that have memory, the least recently used first."""
        self._live_nbytes = 0
        self._kept_nbytes = 0
        """Of units that are offloaded, whose memory a view keeps."""
        self._shares_order = runtime.collectives.world_size > 1
        """Whether every rank must decide alike. [Note: Order of gathers]"""
        self._has_warned = False
        self.is_closed = False

    def note_use(self, paged: PagedUnit, pass_name: str) -> None:
        """Note that `paged`, which is no resident unit, is about to be used."""
        if self._shares_order and self.schedule.last_use != (pass_name, paged.unit.index):
            paged.handler.before_use(paged.unit, pass_name)
        if not self.schedule.observe(pass_name, paged.unit.index, paged.unit.numel):
            self._end_expected()
        if paged.storage.is_full:
            self._order.move_to_end(paged.unit.index)

    def _end_expected(self) -> None:
        for index in self.schedule.end_expected():
            if index in self._order:
                self._order.move_to_end(index)

    def refuse_closed(self, paged: PagedUnit) -> None:
        """Raise ParameterOffloadedError: the engine is closed."""
        ClosedEngine(paged.unit.name).fault_in((), "This call")

    # -- fetch -----------------------------------------------------------------------------------------------------

    def fetch(self, paged: PagedUnit) -> None:
        """Fetch a unit that is about to be used. If the device has no memory for it, evict every idle unit, and try
        once more."""
        if self.is_closed:
            self.refuse_closed(paged)
        if self._kept_nbytes or self._missing_nbytes(paged) > 0:
            self._make_room(paged)
        try:
            self._fetch(paged)
        except torch.OutOfMemoryError:
            for idle in self._kept() if self._shares_order else (*self._idle(), *self._idle_ahead()):
                self.evict(idle)
            self._accelerator.release_cached_memory()
            self._fetch(paged)

    def _fetch(self, paged: PagedUnit) -> None:
        """Fetch a unit for which there is room."""
        unit, storage = paged.unit, paged.storage
        if storage.is_full:  # it is offloaded, and a view keeps its memory
            self._kept_nbytes -= unit.nbytes
        else:
            self._ledger.charge("device", "param_window", unit.nbytes)
            try:
                with self._accelerator.unit_memory():
                    storage.fill()
            except Exception:
                self._ledger.discharge("device", "param_window", unit.nbytes)
                raise
            self._live_nbytes += unit.nbytes
        self._order[unit.index] = paged
        self._order.move_to_end(unit.index)
        paged.begin_fetch()
        try:
            self._accelerator.prepare(storage.flat)
            home, own = self._inventory.home(unit, "param"), storage.flat[paged.own]
            fetch = paged.fetch = home.tier.fetch(home.slot, own, self._inventory.last_update(unit))
            if own.numel() < unit.numel:
                paged.fetch = self._gather(paged, fetch)
        except Exception:  # the tier has waited for what it had begun
            self.evict(paged)
            raise

    def _gather(self, paged: PagedUnit, fetch: Transfer) -> Transfer:
        """Gather the other ranks' shards once `fetch` has brought this rank's."""
        name, flat = paged.unit.name, self._accelerator.alias(paged.storage.flat)
        order = f"{name}, change {paged.version}"
        return self._collectives.all_gather(flat, flat[paged.own], f"unit {name}", after=[fetch], order=order)

    def prefetch(self, current: PagedUnit, phase: CallPhase) -> None:
        """Fetch what is expected after `current`, as far as the prefetch bucket and the free room go, and at least
        one unit where there is a bucket: a unit may be larger than it. Evicts only what is used later. Nothing is
        gathered or fetched ahead across a step that will change it. See [Note: Expected uses].
        """
        bucket_numel, schedule = self._limits.prefetch_numel, self.schedule
        if not bucket_numel:
            return
        is_last_backward = phase.step_follows and phase.now is Phase.BACKWARD
        until = "forward" if is_last_backward and self._shares_order else ""
        for index in schedule.expect_next(current.unit.index, until=until):
            paged, expected_numel = self._units.by_index[index], schedule.expected_numel
            if is_last_backward and paged.waits_for_step and schedule.next_phase == "forward":
                return
            if expected_numel and expected_numel + paged.unit.numel > bucket_numel:
                return
            if not self._may_prefetch(paged):
                return
            if paged.state is UnitState.OFFLOADED and not self._prefetch(paged, current):
                return

    def _prefetch(self, paged: PagedUnit, current: PagedUnit) -> bool:
        """Fetch a unit ahead of its use, in the place of units that are neither expected nor `current`; False where
        there is no room."""
        missing_nbytes, victims = self._missing_nbytes(paged), []
        if missing_nbytes > 0:
            for idle in self._idle():
                if idle is not current:
                    victims.append(idle)
                    missing_nbytes -= idle.unit.nbytes
                    if missing_nbytes <= 0:
                        break
            else:
                return False
            for victim in victims:
                self.evict(victim)
            if self._missing_nbytes(paged) > 0:
                return False  # a view keeps the memory of a unit that is evicted
        if self._kept_nbytes:
            self._make_room(paged)
        try:
            self._fetch(paged)
        except torch.OutOfMemoryError:
            if self._shares_order:
                raise
            return False  # fetched when it is used, with more room made for it
        return True

    def _may_prefetch(self, paged: PagedUnit) -> bool:
        """False while its update waits for gradients: backward may need a later fetch of the lane to compute them."""
        if paged.weights is not WeightState.UPDATING:
            return True
        if self._shares_order:
            return False
        unit_update = self._inventory.last_update(paged.unit)
        return unit_update is None or unit_update.written.done()

    # -- evict -----------------------------------------------------------------------------------------------------

    def retire(self, paged: PagedUnit) -> None:
        """Guard a unit without users; evict it unless the schedule expects it again soon."""
        if paged.num_users or paged.state is not UnitState.IN_USE or paged.is_resident:
            return
        self.guard(paged)
        if self._missing_nbytes(paged) <= 0:
            distance = self.schedule.distance(paged.unit.index)
            if distance is not None and distance <= self._limits.reuse_numel:
                return
        self.evict(paged)

    def guard(self, paged: PagedUnit) -> None:
        """Guard a unit in use; evict it where its bytes are not its home's any more."""
        self._changes.look(paged)
        if paged.weights is WeightState.STALE:
            self.evict(paged)
        elif paged.state is UnitState.IN_USE:
            paged.guard()

    def evict(self, paged: PagedUnit) -> None:
        """Drop a unit from the device, unless it is resident. Its memory stays while other code holds a view of it."""
        storage = paged.storage
        if not storage.is_full or paged.is_resident:
            return
        if paged.unit.index in self.schedule.expected:
            self._end_expected()
        has_arrived, was_kept = True, paged.state is UnitState.OFFLOADED
        if paged.state is UnitState.IN_USE:
            self._changes.look(paged)
        if paged.fetch is not None:  # the transfer still writes these bytes; if it failed, no use has seen them
            try:
                self._accelerator.wait_on_compute(paged.fetch)
            except Exception:
                if not paged.fetch.done():  # of the wait itself, such as a MemoryError
                    raise
                has_arrived = False  # a read that is stuck may write later
        paged.end_residence()
        if storage.is_viewed:
            self._kept_nbytes += 0 if was_kept else paged.unit.nbytes
            return
        self._kept_nbytes -= paged.unit.nbytes if was_kept else 0
        self._accelerator.poison(storage.flat)
        key = storage.key
        storage.empty(keep=has_arrived)
        if storage.key != key:  # another replaced one that NumPy has viewed
            self._units.renew_storages()
        self._order.pop(paged.unit.index, None)
        self._live_nbytes -= paged.unit.nbytes
        self._ledger.discharge("device", "param_window", paged.unit.nbytes)

    def _idle(self) -> Iterator[PagedUnit]:
        """Yield the units that can be evicted and are not expected, the least recently used first."""
        expected = self.schedule.expected
        return (each for index, each in tuple(self._order.items()) if index not in expected and self._can_evict(each))

    def _idle_ahead(self) -> Iterator[PagedUnit]:
        """Yield those that are expected, the farthest first."""
        ahead = [self._units.by_index[index] for index in self.schedule.expected_units()]
        return (paged for paged in ahead if self._can_evict(paged))

    def _can_evict(self, paged: PagedUnit) -> bool:
        return paged.is_idle if self._shares_order else paged.is_evictable

    def _kept(self) -> list[PagedUnit]:
        """List offloaded units whose memory a view has kept, and keeps no more."""
        return [paged for paged in self._order.values() if paged.is_kept and not paged.storage.is_viewed]

    def _missing_nbytes(self, paged: PagedUnit) -> int:
        """By how much the device would be too full with `paged` on it, as decisions count. [Note: Order of gathers]"""
        if self._shares_order:
            counted_nbytes, is_counted = self._live_nbytes - self._kept_nbytes, paged.state is not UnitState.OFFLOADED
        else:
            counted_nbytes, is_counted = self._live_nbytes, paged.storage.is_full
        return counted_nbytes + (0 if is_counted else paged.unit.nbytes) - self._limits.live_nbytes

    def _make_room(self, paged: PagedUnit) -> None:
        unit = paged.unit
        for kept in self._kept() if self._kept_nbytes else ():
            self.evict(kept)
        if self._missing_nbytes(paged) > 0:
            for idle in itertools.chain(self._idle(), self._idle_ahead()):
                self.evict(idle)
                if self._missing_nbytes(paged) <= 0:
                    break
        new_nbytes = 0 if paged.storage.is_full else unit.nbytes
        limit = self._limits.live_nbytes - new_nbytes
        if self._live_nbytes <= limit:
            return
        if self._live_nbytes + new_nbytes > self._limits.most_live_nbytes:
            held = [other.unit.name for other in self._units if other.storage.is_full and other is not paged]
            room_nbytes = max(self._limits.live_nbytes, self._limits.most_live_nbytes)
            message = (
                f"Unit {unit.name} needs {format_nbytes(unit.nbytes)}, but units in use at the same time already fill "
                f"{format_nbytes(self._live_nbytes)} of the {format_nbytes(room_nbytes)} that paged parameters may "
                f"take on the device (on it: {', '.join(held)}). "
            )
            classes = {entry.param.owner for other in self._units if other.is_kept for entry in other.unit.entries}
            if classes:
                message += (
                    f"Views of weights of {', '.join(sorted(classes))} keep their memory after forward, as where an "
                    "autograd function keeps the weight itself. Checkpoint each block with use_reentrant=True (in "
                    "transformers gradient_checkpointing_kwargs={'use_reentrant': True}). "
                )
            raise BudgetError(
                f"{message}Raise stage3_max_live_parameters or tiered_zero.{self._limits.tier}_memory_limit, or lower "
                "tiered_zero.unit_size_cap."
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s more on the device than planned: unit %s is used at the same time as units of other modules. Raise "
                "stage3_max_live_parameters or lower tiered_zero.unit_size_cap to have it planned.",
                format_nbytes(self._live_nbytes - limit), unit.name,
            )  # fmt: skip

    def recount(self) -> None:
        """Count what is on the device, after a call that has failed."""
        paged_units = [paged for paged in self._units if not paged.is_resident]
        self._live_nbytes = sum(paged.unit.nbytes for paged in paged_units if paged.storage.is_full)
        self._kept_nbytes = sum(paged.unit.nbytes for paged in paged_units if paged.is_kept)
        self._ledger.correct("device", "param_window", self._live_nbytes)
        self.schedule.end_expected()
        self._order = OrderedDict((paged.unit.index, paged) for paged in paged_units if paged.storage.is_full)
        self._units.renew_storages()
