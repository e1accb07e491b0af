"""Fetch, prefetch and evict units within the device memory that the plan gives to paged parameters."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from operator import itemgetter
from typing import final

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import BudgetError, ModelError
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.plan.planner import PagerLimits
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.tier import Inventory
from tiered_zero.unit.driver import CallPhase, Phase
from tiered_zero.unit.guard import ClosedEngine
from tiered_zero.unit.unit import PagedUnit, UnitState, UnitTable, WeightState

logger = logging.getLogger("tiered_zero")

Use = tuple[str, PagedUnit]
"""One use of a unit: (pass name, unit). The pass name is "forward", "backward" or "idle" (see
`CallPhase.pass_name`)."""

Pair = tuple[Use | None, Use | None]
"""Two successive uses of units. None stands for no use yet."""


@final
class Schedule:
    """Predicts the next uses of units: stores, for each pair of successive uses, the use that followed it last time. A
    wrong prediction costs only time. Keys are pairs, because a pass uses a tied unit twice (embedding, then head).

    [Note: Expected uses] The expected uses are the predicted next uses, in order. A use becomes expected when its unit
    is prefetched, or is already on the device. If the actual next use is not the first expected use, all expected uses
    are dropped."""

    def __init__(self) -> None:
        self._next: dict[Pair, Use] = {}
        self._last: Pair = (None, None)
        self._position = 0
        """The sum of the units' elements over all uses so far."""
        self._uses: dict[PagedUnit, tuple[Pair, int]] = {}
        """Unit -> (pair, position) of the unit's last use. The pair is this use and the use before it. The position is
        the value of `_position` after this use."""
        self._numel_of: dict[PagedUnit, int] = {}
        self._distances: dict[Pair, int] = {}
        """Pair -> a distance: the sum of the elements of all uses between the pair's second use and the next use of the
        same unit, when the pair last occurred."""
        self._ahead: deque[Use] = deque()
        """The expected uses, the next one first. [Note: Expected uses]"""
        self._tip: Pair = (None, None)
        """The last expected use and the use before it, as a pair; `_last` if no use is expected."""
        self.expected: dict[PagedUnit, int] = {}
        """Unit -> the number of its expected uses. Has no key for a unit without expected uses."""
        self._counted: set[PagedUnit] = set()
        """The prefetched units: `expect_next` has yielded them, and they still have expected uses."""
        self.expected_numel = 0
        """The number of elements of the prefetched units, `_counted`."""

    def observe(self, phase: str, unit: PagedUnit, numel: int) -> bool:
        """Record a use of `unit`, which has `numel` elements, in the pass `phase`. Successive uses of one unit in one
        pass count as one. Return False if another use was expected; the caller must then call `end_expected`."""
        use = (phase, unit)
        if use == self._last[1]:
            return True
        self._next[self._last] = use
        self._last = (self._last[1], use)
        if (earlier := self._uses.get(unit)) is not None:
            self._distances[earlier[0]] = self._position - earlier[1]
        self._position += numel
        self._numel_of[unit] = numel
        self._uses[unit] = self._last, self._position
        if not self._ahead:
            self._tip = self._last
            return True
        if self._ahead[0] != use:
            return False
        self._ahead.popleft()
        self.expected[unit] -= 1
        if not self.expected[unit]:
            del self.expected[unit]
            if unit in self._counted:
                self._counted.discard(unit)
                self.expected_numel -= numel
        return True

    def distance(self, unit: PagedUnit) -> int | None:
        """Predict how many elements are used before the unit is used again; None if that is unknown."""
        if unit not in self._uses:
            return None
        use, position = self._uses[unit]
        between = self._distances.get(use)
        return None if between is None else max(0, between - (self._position - position))

    @property
    def last_use(self) -> Use | None:
        return self._last[1]

    # -- ahead -----------------------------------------------------------------------------------------------------

    def expect_next(self, current: PagedUnit, until: str = "") -> Iterator[PagedUnit]:
        """Add the predicted next uses to the expected ones, one by one. Before adding the first expected use of a unit,
        yield the unit, so that the caller can fetch it. Do not yield `current`, the unit in use. Stop before the first
        use in the pass called `until`. Also stop when the next use is unknown, or when the known uses begin to
        repeat."""
        seen = set()
        while (pair := self._tip) not in seen and len(self._ahead) < len(self._next):
            if (use := self._next.get(pair)) is None or use[0] == until:
                return
            seen.add(pair)
            unit = use[1]
            if unit not in self.expected and unit != current:
                yield unit
                self._counted.add(unit)
                self.expected_numel += self._numel_of[unit]
            self._ahead.append(use)
            self._tip = (pair[1], use)
            self.expected[unit] = self.expected.get(unit, 0) + 1

    @property
    def next_phase(self) -> str:
        """The name of the pass that will use the unit just yielded by `expect_next`."""
        return self._next[self._tip][0]

    def end_expected(self) -> list[PagedUnit]:
        """Drop all expected uses. Return their units, in the order of `expected_units`."""
        units = self.expected_units()
        self._ahead.clear()
        self.expected.clear()
        self._counted.clear()
        self._tip = self._last
        self.expected_numel = 0
        return units

    def expected_units(self) -> list[PagedUnit]:
        """List the units that have expected uses, each once, in reverse order of their first expected use."""
        return list(dict.fromkeys(map(itemgetter(1), self._ahead)))[::-1]


@final
class UnitCache:
    """Fetches whole units from their homes to the device, and evicts them. Used on the driver thread, or on autograd's
    threads.

    [Note: Order of gathers] If homes hold shards, every fetch is a gather, so all ranks must fetch and evict the same
    units in the same order. With several ranks, decisions here depend only on the schedule, the plan and the units'
    states. They do not depend on what may differ between ranks: whether a transfer is done, and which views of a unit
    other code holds. An evicted unit keeps its memory while other code holds a view of it. With several ranks,
    decisions count this memory as free; only the check that raises BudgetError counts it as used."""

    def __init__(self, runtime: Runtime, inventory: Inventory, limits: PagerLimits, units: UnitTable) -> None:
        self._accelerator = runtime.accelerator
        self._collectives = runtime.collectives
        self._ledger = runtime.ledger
        self._inventory = inventory
        self._limits = limits
        self._units = units
        self.schedule = Schedule()
        self._order: OrderedDict[PagedUnit, None] = OrderedDict()
        """Paged units that have memory, the least recently used first."""
        self._live_nbytes = 0
        self._kept_nbytes = 0
        """The bytes of offloaded units that still have device memory, because other code holds or held a view of
        them."""
        self._shares_order = runtime.collectives.world_size > 1
        """Whether all ranks must fetch and evict the same units in the same order. [Note: Order of gathers]"""
        self._has_warned = False
        self.is_closed = False
        self._refusal: ModelError | None = None
        """The error for a change that `check_for_writes` has found; None if there is no change. The next `refuse`
        raises the error."""

    def note_use(self, paged: PagedUnit, pass_name: str) -> None:
        """Record that `paged`, which is not resident, is about to be used in the pass `pass_name`."""
        if self._shares_order and self.schedule.last_use != (pass_name, paged):
            paged.events.before_use(paged.unit, pass_name)
        if not self.schedule.observe(pass_name, paged, paged.unit.numel):
            self._end_expected()
        if paged.storage.is_full:
            self._order.move_to_end(paged)

    def _end_expected(self) -> None:
        for paged in self.schedule.end_expected():
            if paged in self._order:
                self._order.move_to_end(paged)

    def refuse_closed(self, paged: PagedUnit) -> None:
        """Raise ParameterOffloadedError for `paged`, because the engine is closed."""
        ClosedEngine(paged.unit.name).fault_in((), "This call")

    # -- fetch -----------------------------------------------------------------------------------------------------

    def fetch(self, paged: PagedUnit) -> None:
        """Start to fetch a unit that is about to be used; evict idle units first if there is no room. Raises
        BudgetError if units that cannot be evicted take too much memory, OutOfMemoryError if the device has none left,
        and ParameterOffloadedError if the engine is closed."""
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
        """Allocate the unit's memory and start its fetch. The device must have room."""
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
        self._order[paged] = None
        self._order.move_to_end(paged)
        paged.begin_fetch()
        try:
            self._accelerator.poison(storage.flat)
            home, own = self._inventory.home(unit, "param"), storage.flat[paged.own]
            fetch = paged.fetch = home.tier.fetch(home.slot, own, self._inventory.last_update(unit))
            if own.numel() < unit.numel:
                paged.fetch = self._gather(paged, fetch)
        except Exception:  # the tier has waited for what it had begun
            self.evict(paged)
            raise

    def _gather(self, paged: PagedUnit, fetch: Transfer) -> Transfer:
        """Start the gather of a unit's shards, and return its transfer. The gather runs once `fetch` has brought this
        rank's shard."""
        name, flat = paged.unit.name, self._accelerator.alias(paged.storage.flat)
        order = f"{name}, change {paged.version}"
        return self._collectives.all_gather(flat, flat[paged.own], f"unit {name}", after=[fetch], order=order)

    def prefetch(self, current: PagedUnit, phase: CallPhase) -> None:
        """Fetch the units that are used next after `current`, up to stage3_prefetch_bucket_size elements, but at least
        one unit. If that size is 0, fetch nothing. Stop at a unit for which there is no room, or that must wait for its
        update. [Note: Expected uses]"""
        # In the last backward of a step, fetch for the next forward only units that step() will not change; with
        # several ranks none, because which updates have begun may differ between ranks.
        bucket_numel, schedule = self._limits.prefetch_numel, self.schedule
        if not bucket_numel:
            return
        is_last_backward = phase.step_follows and phase.now is Phase.BACKWARD
        until = "forward" if is_last_backward and self._shares_order else ""
        for paged in schedule.expect_next(current, until=until):
            expected_numel = schedule.expected_numel
            if is_last_backward and paged.waits_for_step and schedule.next_phase == "forward":
                return
            if expected_numel and expected_numel + paged.unit.numel > bucket_numel:
                return
            if not self._may_prefetch(paged):
                return
            if paged.state is UnitState.OFFLOADED and not self._prefetch(paged, current):
                return

    def _prefetch(self, paged: PagedUnit, current: PagedUnit) -> bool:
        """Fetch a unit ahead of its use. To make room, evict units without users, except `current` and expected units.
        Return False if there is no room even then."""
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
        """Return whether the unit may be prefetched. A unit whose update began in backward may be prefetched when the
        update has ended; with several ranks, only after step()."""
        if paged.weights is not WeightState.UPDATING:
            return True
        # A fetch would wait for the update, and the update for gradients. To compute these, backward may need a later
        # fetch on the same lane. With several ranks wait for step(), since updates end at different times.
        if self._shares_order:
            return False
        unit_update = self._inventory.last_update(paged.unit)
        return unit_update is None or unit_update.written.done()

    # -- evict -----------------------------------------------------------------------------------------------------

    def retire(self, paged: PagedUnit) -> None:
        """Guard the unit, if it is paged and has no users. Then evict the unit, unless the device has room for it and
        at most `PagerLimits.reuse_numel` elements are predicted to be used before its next use."""
        if paged.num_users or paged.state is not UnitState.IN_USE or paged.is_resident:
            return
        self.guard(paged)
        if self._missing_nbytes(paged) <= 0:
            distance = self.schedule.distance(paged)
            if distance is not None and distance <= self._limits.reuse_numel:
                return
        self.evict(paged)

    def guard(self, paged: PagedUnit) -> None:
        """Guard a unit in use. If user code has changed the unit on the device but not at its home, evict the unit
        instead, which drops the change."""
        self.check_for_writes(paged)
        if paged.weights is WeightState.STALE:
            self.evict(paged)
        elif paged.state is UnitState.IN_USE:
            paged.guard()

    def evict(self, paged: PagedUnit) -> None:
        """Evict a unit, unless it is resident. If other code holds a view of the unit, its memory is not freed yet."""
        storage = paged.storage
        if not storage.is_full or paged.is_resident:
            return
        if paged in self.schedule.expected:
            self._end_expected()
        has_arrived, was_kept = True, paged.state is UnitState.OFFLOADED
        if paged.state is UnitState.IN_USE:
            self.check_for_writes(paged)
        if paged.fetch is not None:  # the transfer still writes these bytes; if it failed, no use has seen them
            try:
                self._accelerator.wait_on_compute(paged.fetch)
            except Exception:
                if not paged.fetch.done():  # the wait itself has failed, such as by a MemoryError
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
        if storage.key != key:  # NumPy had viewed the old storage, and a new one has replaced it
            self._units.renew_storages()
        self._order.pop(paged, None)
        self._live_nbytes -= paged.unit.nbytes
        self._ledger.discharge("device", "param_window", paged.unit.nbytes)

    def _idle(self) -> Iterator[PagedUnit]:
        """Yield the units that can be evicted and are not expected to be used, the least recently used first."""
        expected = self.schedule.expected
        return (paged for paged in tuple(self._order) if paged not in expected and self._can_evict(paged))

    def _idle_ahead(self) -> Iterator[PagedUnit]:
        """Yield the units that can be evicted but are expected to be used, in the order of
        `Schedule.expected_units`."""
        return (paged for paged in self.schedule.expected_units() if self._can_evict(paged))

    def _can_evict(self, paged: PagedUnit) -> bool:
        return paged.is_idle if self._shares_order else paged.is_evictable

    def _kept(self) -> list[PagedUnit]:
        """List the offloaded units that still have memory, although no other code holds a view of them any more."""
        return [paged for paged in self._order if paged.is_kept and not paged.storage.is_viewed]

    def _missing_nbytes(self, paged: PagedUnit) -> int:
        """Return how many bytes have to be freed on the device to make room for `paged`; 0 or less if there is room.
        [Note: Order of gathers]"""
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
        """Count the units and bytes on the device anew, after a failed call."""
        paged_units = [paged for paged in self._units if not paged.is_resident]
        self._live_nbytes = sum(paged.unit.nbytes for paged in paged_units if paged.storage.is_full)
        self._kept_nbytes = sum(paged.unit.nbytes for paged in paged_units if paged.is_kept)
        self._ledger.correct("device", "param_window", self._live_nbytes)
        self.schedule.end_expected()
        self._order = OrderedDict.fromkeys(paged for paged in paged_units if paged.storage.is_full)
        self._units.renew_storages()

    # -- changes by user code that the homes do not have: [Note: Writes through .data] ---------------------------------

    def check_for_writes(self, paged: PagedUnit) -> None:
        """Check whether user code has changed a unit in use without `gathered(modify=True)`. If it has, the next
        `refuse` raises, and the unit, if paged, becomes stale."""
        if paged.state is not UnitState.IN_USE or paged.num_writers:
            return
        if (changed := paged.storage.take_change()) is not None:
            self._refusal = _changed_past_home(*changed)
            paged.mark_stale()

    def refuse(self) -> None:
        """Raise the ModelError that `check_for_writes` has stored since the last `refuse`. `check_for_writes` stores
        one if user code has changed a parameter but not its home."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal


def _changed_past_home(param: str, replaced_in: str) -> ModelError:
    """Return the error for a parameter that was changed on the device but not at its home. `replaced_in`: the class of
    the parameter's module if the parameter was given other memory; else empty."""
    message = (
        f"The values of parameter {param} were changed in forward or between steps, but not at its home on the tiers: "
        "the next update would undo that. Change parameters between steps, inside "
        "`with tiered_zero.gathered(param, modify=True):`."
    )
    if replaced_in:
        message += (
            f" It was given other memory (.data = ...). If its module, {replaced_in}, does so in its forward, that "
            "module cannot be paged: from bitsandbytes, take Linear4bit in place of Linear8bitLt. On a CPU with "
            "AVX-512 model.eval() makes each Linear4bit do so too: call train() of these layers after it."
        )
    return ModelError(message)
