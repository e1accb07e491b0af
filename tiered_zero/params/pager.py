"""Which units are on the device, and how they come and go."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from tiered_zero.errors import TieredZeroError
from tiered_zero.layout.flat import Unit
from tiered_zero.params.flat_storage import ClosedEngine, FlatStorage, Lender
from tiered_zero.params.outside_modes import runs_outside_modes
from tiered_zero.params.pager_state import PagerState
from tiered_zero.params.refusals import (
    changed_past_home_error,
    changed_since_forward_error,
    lent_error,
    no_room_error,
    offloaded_error,
    used_before_step_error,
)
from tiered_zero.params.unit_state import Frame, HeldWrapper, Loan, Residency, SavedView, UnitState
from tiered_zero.sizes import format_nbytes

logger = logging.getLogger("tiered_zero")


class Pager(PagerState):
    """Owns the state of every paged unit. Units without a home in the inventory live on the device and are always lent.

    Driver thread, or autograd's while the driver waits in backward.
    """

    # -- set-up ----------------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit, params: Sequence[nn.Parameter], lender: Lender) -> FlatStorage:
        """Turn `params` into views of one flat of this unit; their former bytes go. Returns the empty storage.

        `lender`: is asked where a parameter is used while it is guarded.
        """
        place = None
        if self._inventory.find(unit, "param") is None:
            self._ledger.charge("device", "param", unit.nbytes)
        else:
            place = self._accelerator.reserve_place(unit.nbytes, self._limits.live_nbytes)
        storage = FlatStorage(unit, params, self._accelerator.device, lender, place)
        residency = Residency(unit, storage, params={param: i for i, param in enumerate(params)})
        self._residencies[unit.index] = residency
        self._by_storage[storage.key] = residency
        self._by_param.update(dict.fromkeys(params, residency))
        return storage

    def settle(self, unit: Unit) -> None:
        """The unit's first bytes are in place. One that lives on the device is lent for good."""
        residency = self._residencies[unit.index]
        if self._inventory.find(unit, "param") is None:
            residency.state = UnitState.LENT
            residency.num_lends = 1
            residency.storage.expose()

    # -- lending ---------------------------------------------------------------------------------------------------

    @runs_outside_modes
    def acquire(self, unit: Unit) -> None:
        """Make the unit's parameters usable by what compute launches from now on. Pairs with `release`."""
        self.num_uses += 1
        self._acquire(self._residencies[unit.index]).num_lends += 1

    @runs_outside_modes
    def release(self, unit: Unit) -> None:
        """One user is done. After the last one forward gives the unit up; backward holds it until it needs the room."""
        residency = self._residencies[unit.index]
        residency.num_lends -= 1
        assert residency.num_lends >= 0, f"{unit.name} released more often than acquired"
        if residency.num_lends == 0 and self.phase.pass_name != "backward":
            self._retire(residency)

    def lend(self, residency: Residency) -> Loan:
        """As `acquire`, outside of forward and backward. Ends by `end_loan`, or when its last reference goes."""
        residency.loans.add(loan := Loan(residency))
        self.acquire(residency.unit)
        return loan

    def end_loan(self, loan: Loan) -> None:
        loan.residency.loans.discard(loan)
        self.release(loan.residency.unit)

    @contextmanager
    def frame(self, units: Sequence[Unit] = ()) -> Iterator[None]:
        """Lend `units`, and whatever is demanded inside, until the block ends (also by an exception)."""
        self.enter_frame(units)
        try:
            yield
        finally:
            self.exit_frame()

    @runs_outside_modes
    def enter_frame(self, units: Sequence[Unit]) -> None:
        self.driver.check("A module's forward")
        self.num_uses += 1
        if not self._frames:
            self._copies.end()  # a state_dict that its own hooks broke off is not going on any more
        self._frames.append(frame := Frame())
        self.refuse_changes()
        for unit in units:
            self.acquire(unit)
            frame.lent.append(self._residencies[unit.index])

    @runs_outside_modes
    def exit_frame(self) -> None:
        if not self._frames:  # its module was refused before it had one
            return
        frame = self._frames.pop()
        for residency in frame.lent:
            self.release(residency.unit)
        for residency in frame.demanded:
            if residency.num_lends == 0 and self.phase.pass_name != "backward":
                self._retire(residency)

    def is_running(self) -> bool:
        """A module of ours is running, on this thread."""
        if self._frames:
            self.driver.check("A module's forward")
        return bool(self._frames)

    def is_called_directly(self) -> bool:
        """No module of ours is running, and neither the engine's forward nor a backward has called this one."""
        return not self._frames and not self._in_backward() and self.phase.pass_name == "idle"

    @runs_outside_modes
    def demand(self, params: Sequence[nn.Parameter], function: str) -> None:
        """[Note: Three doors] A function is called with `params`, the first of which is away: lend them together."""
        residencies = [self._by_param[param] for param in params]
        if not (self._frames and not self.driver.is_other()) and not self._in_backward():
            for param, residency in zip(params, residencies, strict=True):
                self._refuse_if_away(param, residency, function)
        for residency in residencies:  # none makes room for another
            residency.num_lends += 1
        try:
            for residency in residencies:
                self._acquire(residency)
        finally:
            for residency in residencies:
                residency.num_lends -= 1
        if self._frames:
            self._frames[-1].demanded += residencies

    def _refuse_if_away(self, param: nn.Parameter, residency: Residency, function: str) -> None:
        """Between steps a unit that is paged has no bytes here; one that lives on the device waits for its update."""
        if residency.state is UnitState.LENT or self.is_device_resident(residency.unit):
            return
        self._check_open(residency.unit)
        name = residency.unit.entries[residency.params[param]].param.name
        tier = self._inventory.home(residency.unit, "param").tier.name
        raise offloaded_error(function, name, tier, residency.unit.dtype, self._accelerator.device)

    @runs_outside_modes
    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedView | HeldWrapper:
        """Forward saves `tensor` for backward: a view of a unit's flat is saved by name, anything else as it is."""
        inner = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        residency = self._by_storage.get(inner.untyped_storage()._cdata)
        if residency is None:
            return tensor
        size, stride, offset = tuple(inner.size()), inner.stride(), int(inner.storage_offset())
        saved = SavedView(residency.unit.index, residency.version, size, stride, offset, inner.dtype)
        return saved if inner is tensor else HeldWrapper(tensor, inner.detach(), saved)

    @runs_outside_modes
    def unpack(self, saved: torch.Tensor | SavedView | HeldWrapper) -> torch.Tensor:
        """[Note: Three doors] Backward needs what forward saved. Weights that have changed since raise ModelError,
        where PyTorch raises RuntimeError by its version counters, which do not see our writes."""
        if isinstance(saved, HeldWrapper):
            self.unpack(saved.inner)
            return saved.wrapper
        if not isinstance(saved, SavedView):
            return saved
        self._in_backward()
        residency = self._residencies[saved.unit_index]
        if residency.unit.index not in self._blocked and residency.version != saved.version:
            raise changed_since_forward_error(residency.unit.name)
        return self._acquire(residency).storage.view(saved.size, saved.stride, saved.offset, saved.dtype)

    def is_device_resident(self, unit: Unit) -> bool:
        return self._inventory.find(unit, "param") is None

    # -- backward --------------------------------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        """Whether autograd runs, or the engine's backward is about to. Notices one that the user started himself."""
        runs = torch._C._current_graph_task_id() != -1
        if runs and self.phase.pass_name == "idle":
            self.phase.has_own_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_noticed_backward)
        elif not runs and self.phase.has_own_backward:  # it ended by an exception
            self._end_noticed_backward()
        return runs or self.phase.pass_name == "backward"

    def _end_noticed_backward(self) -> None:
        self.phase.has_own_backward = False
        self.end_pass()

    @runs_outside_modes
    def finish_gradients(self, unit: Unit) -> None:
        """Every gradient of the unit has arrived: nothing later in this backward is expected to need it."""
        residency = self._residencies[unit.index]
        if residency.state is UnitState.LENT and residency.num_lends == 0:
            self._retire(residency)

    @runs_outside_modes
    def end_pass(self) -> None:
        """Forward or backward is over (or failed): whatever no one uses goes by the rules for idle units."""
        for residency in self._residencies.values():
            if residency.state is UnitState.LENT and residency.num_lends == 0:
                self._retire(residency)

    def forget(self) -> None:
        """The homes of trainable units are about to change: drop what the device holds of them.

        A storage that somebody still views keeps its memory, and is read again in place at the next use.
        """
        for residency in self._residencies.values():
            if residency.unit.trainable:
                self._forget(residency)
        self.refuse_changes(late=True)

    def end_update(self) -> None:
        """Resident units that were acquired during the update have their new values."""
        for residency in self._residencies.values():
            if residency.state is UnitState.LENT and self.is_device_resident(residency.unit):
                residency.storage.begin_watch()

    def _forget(self, residency: Residency) -> None:
        residency.version += 1
        if self.is_device_resident(residency.unit):
            self._look_for_change(residency)
            return
        if residency.num_lends and not self._frames:
            gc.collect()  # a loan that was interrupted may be kept by the exception's own circle
            residency.num_lends = len(residency.loans)
        if residency.num_lends:
            raise lent_error(residency.unit.name)
        self._evict(residency)

    def block_for_update(self) -> None:
        """Updates begin that will be published one by one: every trainable unit is guarded until its own."""
        begun, self._blocked = self._blocked, set()
        for residency in self._residencies.values():
            if not residency.unit.trainable or residency.unit.index in begun:
                continue  # what was fetched of those since waits for their updates, which may wait for this step
            self._forget(residency)
            if self.is_device_resident(residency.unit):
                self._guard(residency)
        self.refuse_changes(late=True)

    def block_unit_for_update(self, unit: Unit) -> bool:
        """The unit's update begins while backward goes on, so nobody may see it before the step is taken. False, with
        nothing done, while somebody uses it."""
        residency = self._residencies[unit.index]
        resident = self.is_device_resident(unit)
        if residency.storage.is_viewed or (residency.num_lends and not resident):
            return False
        if resident:
            self._guard(residency)
        else:
            self._evict(residency)
        residency.version += 1
        self._blocked.add(unit.index)
        return True

    def unblock(self) -> None:
        """The updates that units were blocked for are given up, before they began."""
        self._blocked.clear()

    def await_update(self, unit: Unit) -> None:
        """Block until the unit's last update is published; raise what made it fail."""
        unit_update = self._inventory.published(unit)
        if unit_update is not None and not unit_update.written.done():
            with self._recorder.span("compute", "wait_update", unit.name):
                unit_update.written.wait()
        elif unit_update is not None:
            unit_update.written.wait()  # done: returns at once, or raises

    def await_making(self, unit: Unit) -> None:
        """Block until the unit's new parameters are computed: its gradients are not needed any more, and a fetch knows
        how they come here. Raises what made that fail, in so far as it has by then."""
        unit_update = self._inventory.published(unit)
        if unit_update is not None and not unit_update.written.done():
            with self._recorder.span("compute", "wait_update", unit.name):
                unit_update.computed.wait()

    @runs_outside_modes
    def abort(self) -> None:
        """No module runs any more: every frame ends, and what was counted is counted anew from what is there."""
        self._frames.clear()
        self._fetching, self._is_moving, self.keeper.is_busy = None, False, False
        self.phase.has_own_backward = False
        self._copies.end()
        paged = [r for r in self._residencies.values() if not self.is_device_resident(r.unit)]
        for residency in self._residencies.values():
            residency.num_lends = len(residency.loans) + self.is_device_resident(residency.unit)
        for residency in paged:
            if residency.num_lends == 0:  # `gathered` may be open around the forward that failed
                self._evict(residency)
        self._live_nbytes = sum(residency.unit.nbytes for residency in paged if residency.storage.is_full)
        self._ledger.correct("device", "param_window", self._live_nbytes)
        self._by_storage = {residency.storage.key: residency for residency in self._residencies.values()}

    @runs_outside_modes
    def remember(self, unit: Unit) -> torch.Tensor | None:
        """Somebody may change the lent parameters: what `write_back` needs of them as they are."""
        return self.keeper.remember(unit, self._residencies[unit.index].storage.flat)

    @runs_outside_modes
    def write_back(self, unit: Unit, old: torch.Tensor | None) -> None:
        """Somebody changed the lent parameters: their home, and whatever was derived from them, must follow."""
        residency = self._residencies[unit.index]
        residency.version += 1
        residency.storage.take_back(keep=True)
        try:
            self.keeper.change(unit, residency.storage.flat, old)
        except BaseException:
            residency.is_changed = True  # from its home, so that it is not kept
            raise

    # -- whole values ----------------------------------------------------------------------------------------------

    @runs_outside_modes
    def drop_changes(self, unit: Unit) -> str | None:
        """A loan ends: the name of a parameter that was changed and not written back. Its unit is read again."""
        residency = self._residencies[unit.index]
        if residency.num_lends > 1 + self.is_device_resident(unit):
            return None  # the outermost user looks
        if (changed := residency.storage.end_change()) is not None:
            residency.is_changed = True
        return changed

    def refuse_changes(self, late: bool = False) -> None:
        """Raises ModelError where parameters were changed past their homes since the last call. `late`: also look at
        what only the device knows yet, and wait for it."""
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal
        for residency in self._residencies.values() if late else ():
            if (name := residency.storage.late_change()) is not None:
                raise changed_past_home_error(name)

    @runs_outside_modes
    def check_converted(self) -> None:
        """Raises ModelError where a parameter that lives on the device was moved or converted."""
        for residency in self._residencies.values():
            if residency.state is UnitState.LENT and self.is_device_resident(residency.unit):
                residency.storage.check_converted()

    def residency(self, param: nn.Parameter) -> Residency | None:
        return self._by_param.get(param)

    def storage(self, unit: Unit) -> FlatStorage:
        return self._residencies[unit.index].storage

    def start_copying(self, before_weights_read: Callable[[], None]) -> None:
        """A module's state_dict begins: `detach` of a parameter that is away gives a CPU copy from its home."""
        self.num_uses += 1
        self._copies.start(before_weights_read)

    def stop_copying(self) -> None:
        self._copies.stop()

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return self.cpu_copy(param) if self._copies.is_open else None

    @runs_outside_modes
    def idle_copy(self, param: nn.Parameter, before_weights_read: Callable[[], None]) -> torch.Tensor | None:
        if self._closed or self._frames or self._in_backward():
            return None
        with self.driver.entered("A copy of a parameter"):
            before_weights_read()
            return self.cpu_copy(param)

    @runs_outside_modes
    def cpu_copy(self, param: nn.Parameter) -> torch.Tensor:
        """[its shape] on the CPU, a copy, from wherever the bytes are; tied names get the same tensor while copying."""
        residency = self._by_param[param]
        on_device = residency.state is UnitState.LENT or self.is_device_resident(residency.unit)
        if not on_device:
            self._check_open(residency.unit)
        return self._copies.take(param, residency, on_device)

    def close(self) -> None:
        """Parameters that live on the device keep their values; those of the others end with their tiers."""
        self._closed = True
        for residency in self._residencies.values():
            was_lent, residency.num_lends = residency.num_lends, 0
            if self.is_device_resident(residency.unit):
                residency.storage.detach_params()
                self._ledger.discharge("device", "param", residency.unit.nbytes if was_lent else 0)
            else:
                self._evict(residency)
                residency.storage.orphan_params()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _acquire(self, residency: Residency) -> Residency:
        if not self.is_device_resident(residency.unit):
            self._schedule.observe(self.phase.pass_name, residency.unit.index)
        residency.clock = next(self._ticks)
        if residency.unit.index in self._blocked:
            raise used_before_step_error(residency.unit.name)
        if residency.state is UnitState.LENT:
            return residency
        if residency.state is UnitState.AWAY:
            self._fetch_on_demand(residency)
        self._prefetch(residency)  # before the wait: an update under way then has where to put what it makes
        if self.is_device_resident(residency.unit):
            self.await_update(residency.unit)
        elif residency.fetch is None:  # fetched since its last update: what that still writes is its home
            self.await_making(residency.unit)
        else:
            try:
                self.await_making(residency.unit)
                with self._recorder.span("compute", "wait_param", residency.unit.name):
                    self._accelerator.wait_on_compute(residency.fetch)
            except BaseException:
                self._evict(residency)  # what arrived is not the unit; where the wait was interrupted, it still arrives
                raise
            residency.fetch = None
        residency.state = UnitState.LENT
        residency.storage.expose()
        return residency

    def _check_open(self, unit: Unit) -> None:
        if self._closed:
            ClosedEngine(unit.name).demand((), "This call")

    def _fetch(self, residency: Residency) -> None:
        self._check_open(residency.unit)
        unit, storage = residency.unit, residency.storage
        if not storage.is_full:
            self._make_room(unit)
            self._is_moving = True
            self._ledger.charge("device", "param_window", unit.nbytes)
            try:
                storage.fill()
            except BaseException:
                self._ledger.discharge("device", "param_window", unit.nbytes)
                raise
            self._live_nbytes += unit.nbytes
            self._is_moving = False
        residency.clock = next(self._ticks)
        self._fetching = residency
        try:
            self._accelerator.prepare(storage.flat)
            home = self._inventory.home(unit, "param")
            residency.fetch = home.tier.fetch(home.slot, storage.flat, self._inventory.published(unit))
        except (TieredZeroError, torch.OutOfMemoryError):  # the tier has waited for what it had begun
            self._fetching = None
            self._evict(residency)
            raise
        residency.state = UnitState.READY
        self._fetching = None

    def _fetch_on_demand(self, residency: Residency) -> None:
        """Fetch a unit that is about to be used. Where the device has no memory for it, evict every idle unit, and try
        once more."""
        try:
            self._fetch(residency)
        except torch.OutOfMemoryError:
            for idle in self._evictable():
                self._evict(idle)
            self._accelerator.release_cached_memory()
            self._fetch(residency)

    def _prefetch(self, current: Residency) -> None:
        """Start what is expected next, as far as the prefetch bucket and the free room go, and at least one unit where
        there is a bucket: a unit may be larger than it. Evicts only what is used later.
        """
        if not self._limits.look_ahead.prefetch_numel:
            return
        budget = self._limits.look_ahead.prefetch_numel
        wanted = {current.unit.index}
        for _, index in self._schedule.upcoming():
            residency = self._residencies[index]
            if index in wanted:
                continue
            budget -= residency.unit.numel
            is_next = len(wanted) == 1
            wanted.add(index)
            if (budget < 0 and not is_next) or not self._may_fetch_ahead(residency.unit):
                return
            if residency.state is UnitState.AWAY:
                new_nbytes = 0 if residency.storage.is_full else residency.unit.nbytes
                missing = self._live_nbytes + new_nbytes - self._limits.live_nbytes
                victims = [r for r in self._evictable() if r.unit.index not in wanted]
                if missing > sum(r.unit.nbytes for r in victims):
                    return
                while missing > 0:
                    missing -= victims[0].unit.nbytes
                    self._evict(victims.pop(0))
                if self._live_nbytes + new_nbytes > self._limits.live_nbytes:
                    return  # somebody still views what was given up
                try:
                    self._fetch(residency)
                except torch.OutOfMemoryError:
                    return  # fetched when it is used, with more room made for it

    def _may_fetch_ahead(self, unit: Unit) -> bool:
        """Not while its update waits for backward, which may wait for what stands behind it on the lane."""
        unit_update = self._inventory.published(unit)
        return unit.index not in self._blocked or unit_update is None or unit_update.written.done()

    def _evictable(self) -> list[Residency]:
        """Units with bytes that nobody is using, least recently used first."""
        idle = [
            r
            for r in self._residencies.values()
            if r.num_lends == 0 and r.storage.is_full and (r.fetch is not None or not r.storage.is_viewed)
        ]
        return sorted((r for r in idle if r is not self._fetching), key=lambda r: r.clock)

    def _make_room(self, unit: Unit) -> None:
        limit = self._limits.live_nbytes - unit.nbytes
        for residency in self._evictable():
            if self._live_nbytes <= limit:
                return
            self._evict(residency)
        if self._live_nbytes <= limit:
            return
        if self._live_nbytes + unit.nbytes > self._limits.most_live_nbytes:
            held = [r.unit.name for r in self._residencies.values() if r.storage.is_full and r.unit.index != unit.index]
            limits = self._limits
            room_nbytes = max(limits.live_nbytes, limits.most_live_nbytes)
            raise no_room_error(unit.name, unit.nbytes, held, self._live_nbytes, room_nbytes)
        if not self._told_excess:
            self._told_excess = True
            logger.warning(
                "%s more on the device than planned: unit %s is used together with others than its parent modules'",
                format_nbytes(self._live_nbytes - limit), unit.name,
            )  # fmt: skip

    def _retire(self, residency: Residency) -> None:
        """Nobody uses the unit any more: guard it, and keep the bytes only if they are expected again soon."""
        if residency.state is not UnitState.LENT or self.is_device_resident(residency.unit):
            return
        self._guard(residency)
        distance = 0
        for _, index in self._schedule.upcoming():
            if index == residency.unit.index:
                if distance <= self._limits.look_ahead.reuse_numel and self._live_nbytes <= self._limits.live_nbytes:
                    return
                break
            distance += self._residencies[index].unit.numel
        self._evict(residency)

    def _guard(self, residency: Residency) -> None:
        """LENT -> READY; AWAY where the bytes are not the unit's any more."""
        self._look_for_change(residency)
        residency.state = UnitState.READY
        residency.storage.hide()
        if residency.is_changed:
            self._evict(residency)

    def _look_for_change(self, residency: Residency) -> None:
        """A lent unit that was changed while nobody asked for it: that is lost, and `refuse_changes` tells of it."""
        if residency.state is UnitState.LENT and (name := residency.storage.end_change()) is not None:
            self._refusal, residency.is_changed = changed_past_home_error(name), True

    def _evict(self, residency: Residency) -> None:
        if not residency.storage.is_full or self.is_device_resident(residency.unit):
            return
        self._look_for_change(residency)
        residency.is_changed = False
        arrived = True
        if residency.fetch is not None:  # the transfer still writes these bytes; if it failed, nobody used them
            try:
                self._accelerator.wait_on_compute(residency.fetch)
            except Exception:
                arrived = False  # a read that is stuck may write later
            residency.fetch = None
        residency.state = UnitState.AWAY
        residency.storage.hide()
        if residency.storage.is_viewed:
            return
        self._is_moving = True
        self._accelerator.poison(residency.storage.flat)
        key = residency.storage.key
        residency.storage.empty(keep=arrived)
        self._by_storage[residency.storage.key] = self._by_storage.pop(key)
        self._live_nbytes -= residency.unit.nbytes
        self._ledger.discharge("device", "param_window", residency.unit.nbytes)
        self._is_moving = False
