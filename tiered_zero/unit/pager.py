"""The pager: units in use and their users; the entry points of forward, backward and user code to paging."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from torch import nn

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.outside_modes import runs_outside_modes
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.planner import PagerLimits
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.unit.driver_thread import CallPhase, DriverThread, Phase
from tiered_zero.unit.flat_storage import FlatStorage
from tiered_zero.unit.guarded_parameter import offloaded_error
from tiered_zero.unit.offloaded_params import OffloadedParams
from tiered_zero.unit.param_changes import ParamChanges
from tiered_zero.unit.param_handlers import FaultHandler
from tiered_zero.unit.saved_views import SavedViews, TensorMover, changed_weights
from tiered_zero.unit.state_dict import ParamCopies
from tiered_zero.unit.unit_cache import UnitCache
from tiered_zero.unit.unit_state import Frame, PagedUnit, UnitState, UnitTable, WeightState
from tiered_zero.unit.update_guard import UpdateGuard


@final
class Pager:
    """Owns the state of every unit. A resident unit is always in use, except while it waits for its update.

    Driver thread, or autograd's while the driver waits in backward. Four objects share the units: `changes` (what user
    code writes to them), `copies` (what it copies), `updates` (what the update policy does to them) and `saved_views`
    (what autograd saves).
    """

    def __init__(
        self,
        runtime: Runtime,
        inventory: Inventory,
        offloaded_params: OffloadedParams,
        limits: PagerLimits,
        phase: CallPhase,
        mover: TensorMover | None = None,
    ) -> None:
        """`mover`: gets what autograd saves besides views of units."""
        self._accelerator = runtime.accelerator
        self._ledger = runtime.ledger
        self._recorder = runtime.recorder
        self._inventory = inventory
        self._limits = limits
        self.offloaded_params = offloaded_params
        self.driver = DriverThread()
        self.frames: list[Frame] = []
        """Of the modules that run."""
        self.loading: list[AbstractContextManager[None]] = []
        """Blocks of gathered parameters that a load_state_dict() is in."""
        self.units = UnitTable()
        self.changes = ParamChanges(self.units, offloaded_params, runtime)
        self._cache = UnitCache(runtime, inventory, limits, self.units, self.changes)
        self.updates = UpdateGuard(self.units, self._cache, self.changes, inventory, runtime.recorder)
        self.saved_views = SavedViews(self.units, self._fault_in_saved, mover)
        self.copies = ParamCopies(offloaded_params, runtime.collectives, self.driver, self.units, self._cache)
        self.num_uses = 0
        """Frames, gathers and copies so far: whether weights were used since some moment."""
        self.phase = phase

    # -- set-up ----------------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit, params: Sequence[nn.Parameter], handler: FaultHandler) -> None:
        """Turn `params` into views of one flat of this unit, which is empty; drop their former bytes.

        `handler`: is called where a parameter is used while it is guarded.
        """
        place = None
        memory: AbstractContextManager[None] = nullcontext()
        if (home := self._inventory.find(unit, "param")) is None:
            self._ledger.charge("device", "param", unit.nbytes)
        else:
            place = self._accelerator.reserve_place(unit.nbytes, self._limits.live_nbytes)
            memory = self._accelerator.unit_memory()
        with memory:
            storage = FlatStorage(unit, params, self._accelerator.device, handler, place)
        self.units.add(unit, storage, params, handler, None if home is None else home.elements(unit))

    def store(self, unit: Unit, flat: torch.Tensor) -> None:
        """Write `flat` [P], on the CPU, as the first values of a unit: to its home, or to the device where it lives."""
        paged = self.units.by_index[unit.index]
        if not paged.is_resident:
            self.offloaded_params.store(unit, flat)
            return
        paged.storage.fill()
        paged.storage.flat.copy_(flat)
        paged.add_user()
        paged.begin_use()

    # -- use -------------------------------------------------------------------------------------------------------

    def _acquire(self, paged: PagedUnit, pass_name: str) -> None:
        """Make the unit's parameters usable by what compute launches from now on. Pairs with `_release`."""
        if not paged.unit.trainable:
            paged.storage.count_references(is_recomputed=pass_name == "backward")
        self._bring(paged, pass_name)
        paged.add_user()

    def _release(self, paged: PagedUnit, pass_name: str) -> None:
        """End one use. After the last, forward guards or evicts the unit; backward holds it until it needs the room."""
        paged.remove_user()
        if pass_name != "backward":
            self._cache.retire(paged)

    def _bring(self, paged: PagedUnit, pass_name: str) -> None:
        """Fetch the unit if it is offloaded, wait for its own update, unguard it. Adds no user."""
        if not paged.is_resident:
            self._cache.note_use(paged, pass_name)
        state = paged.state
        if paged.weights is WeightState.UPDATING:
            raise ModelError(
                f"Unit {paged.unit.name} is used before step(), but its update has begun in backward, as it does where "
                'nothing is clipped or checked. Set "tiered_zero": {"optimizer_in_backward": false} for such a loop.'
            )
        if state is UnitState.IN_USE:
            return
        if state is UnitState.OFFLOADED:
            self._cache.fetch(paged)
        # before the wait: an update under way then has where to put what it computes
        self._cache.prefetch(paged, self.phase)
        try:
            if (unit_update := self._inventory.last_update(paged.unit)) is not None:
                self.updates.wait(paged.unit, unit_update, until_written=paged.is_resident)
            if paged.fetch is not None:  # else it was fetched since its last update: what that still writes is its home
                self._wait_fetched(paged.unit, paged.fetch)
        except Exception:
            if paged.fetch is not None:
                self._cache.evict(paged)  # these are not its bytes
            raise
        paged.begin_use()

    def _wait_fetched(self, unit: Unit, fetch: Transfer) -> None:
        """Order compute after the fetch. Raises its error."""
        if fetch.done():
            self._accelerator.wait_on_compute(fetch)
            return
        with self._recorder.span("compute", "wait_param", unit.name):
            self._accelerator.wait_on_compute(fetch)

    @runs_outside_modes
    def begin_gather(self, paged: PagedUnit) -> None:
        """Acquire a unit outside of forward and backward, until `end_gather`."""
        self.num_uses += 1
        self._acquire(paged, self.phase.pass_name)
        paged.num_gathers += 1

    @runs_outside_modes
    def end_gather(self, paged: PagedUnit) -> None:
        paged.num_gathers -= 1
        self._release(paged, self.phase.pass_name)

    # -- entry points ----------------------------------------------------------------------------------------------

    @contextmanager
    def frame(self, units: Sequence[Unit] = ()) -> Iterator[None]:
        """Hold `units`, and whatever is faulted in inside, until the block ends (also by an exception)."""
        self.enter_frame(units)
        try:
            yield
        finally:
            self.exit_frame()

    def enter_frame(self, units: Sequence[Unit]) -> None:
        is_outermost, thread = not self.frames, threading.get_ident()
        if is_outermost or self.frames[-1].thread != thread:  # else this thread is inside
            self.driver.check("A module's forward")
        self.num_uses += 1
        self.frames.append(frame := Frame(thread=thread))
        if is_outermost:
            self.copies.end()  # of a state_dict that its own hooks broke off
            self.changes.refuse()
        if units:
            frame.pass_name = self.phase.pass_name
        for unit in units:
            paged = self.units.by_index[unit.index]
            self._acquire(paged, frame.pass_name)
            frame.held.append(paged)
        if not torch.is_grad_enabled() and torch.is_autocast_cache_enabled():  # [Note: Casts of weights]
            frame.disables_cast_cache = not all(paged.is_resident for paged in frame.held)
            torch.set_autocast_cache_enabled(not frame.disables_cast_cache)
        frame.is_inside_hooks = self.saved_views.begin_module()

    def exit_frame(self) -> bool:
        """Close the frame that this thread has opened last; False if it has none."""
        if not self.frames or self.frames[-1].thread != threading.get_ident():
            return False
        frame = self.frames.pop()
        if frame.is_inside_hooks:
            self.saved_views.end_inside()
        if frame.disables_cast_cache:
            torch.set_autocast_cache_enabled(True)
        for paged in frame.held:
            self._release(paged, frame.pass_name)
        if frame.faulted:
            self._release_faulted(frame)
        return True

    @runs_outside_modes
    def _release_faulted(self, frame: Frame) -> None:
        if self.phase.pass_name != "backward":
            for paged in frame.faulted:
                paged.storage.count_references(is_recomputed=False)
                self._cache.retire(paged)

    def is_running(self) -> bool:
        """Whether a module of the model runs, on this thread."""
        if self.frames:
            self.driver.check("A module's forward")
        return bool(self.frames)

    def is_called_directly(self) -> bool:
        """Whether the module whose forward begins is called by the user, past the engine (a direct call)."""
        return not self.frames and self.phase.now is Phase.IDLE and torch._C._current_graph_task_id() == -1

    @runs_outside_modes
    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        """Bring the units of `params` together for `function`, which is called with them; the first is offloaded.

        Raises ParameterOffloadedError outside of forward and backward. See [Note: Entry points].
        """
        paged_units = [self.units.by_param[param] for param in params]
        if self.driver.is_other() or not (self.frames or self._is_in_backward()):
            for param, paged in zip(params, paged_units, strict=True):
                self._refuse_if_offloaded(param, paged, function)
        for paged in paged_units:  # none makes room for another
            paged.add_user()
        try:
            for paged in paged_units:
                self._bring(paged, self.phase.pass_name)
        finally:
            for paged in paged_units:
                paged.remove_user()
        if self.frames:
            self.frames[-1].faulted += paged_units
        self.saved_views.save_recomputed()

    def _refuse_if_offloaded(self, param: nn.Parameter, paged: PagedUnit, function: str) -> None:
        """Raise ParameterOffloadedError for a unit without bytes on the device. A resident one waits for its update."""
        if paged.state is UnitState.IN_USE or paged.is_resident:
            return
        if self._cache.is_closed:
            self._cache.refuse_closed(paged)
        name = paged.unit.entries[paged.params[param]].param.name
        tier = self._inventory.home(paged.unit, "param").tier.name
        raise offloaded_error(function, name, tier, paged.unit.dtype, self._accelerator.device)

    def _fault_in_saved(self, unit_index: int, version: int | None) -> FlatStorage:
        """Bring a unit of which autograd unpacks a view that it saved at `version`. Raises ModelError where its weights
        have changed since."""
        paged = self.units.by_index[unit_index]
        if torch._C._current_graph_task_id() != self.phase.task:
            paged.handler.notice_backward()
        if paged.weights is not WeightState.UPDATING and version not in (None, paged.version):
            raise changed_weights(paged.unit.name)
        self._bring(paged, self.phase.pass_name)
        return paged.storage

    # -- backward --------------------------------------------------------------------------------------------------

    def _is_in_backward(self) -> bool:
        """Whether autograd runs, or the engine's backward is about to."""
        return self.phase.now is Phase.BACKWARD or torch._C._current_graph_task_id() != -1

    @runs_outside_modes
    def finish_gradients(self, unit: Unit) -> None:
        """Guard or evict a unit that backward holds: every gradient of it has arrived, so no later node is expected to
        need it."""
        self._cache.retire(self.units.by_index[unit.index])

    @runs_outside_modes
    def end_pass(self) -> None:
        """Guard or evict every unit without users: forward or backward is over, or has failed."""
        for paged in self.units.by_index.values():
            if paged.state is UnitState.IN_USE and not paged.num_users:
                self._cache.retire(paged)

    # -- failures and the end --------------------------------------------------------------------------------------

    @runs_outside_modes
    def abort(self) -> None:
        """End every frame, evict units without users, and count anew: no module runs any more. What a transfer still
        fetches is left to it, as if it were prefetched."""
        if any(frame.disables_cast_cache and frame.thread == threading.get_ident() for frame in self.frames):
            torch.set_autocast_cache_enabled(True)
        self.frames.clear()
        self.loading.clear()
        self.copies.end()
        for paged in self.units:
            paged.reset_users(paged.num_gathers + paged.is_resident)
        for paged in self.units:  # `gathered` may be open around the forward that failed
            if paged.num_users == 0 and (paged.fetch is None or paged.fetch.done()):
                self._cache.evict(paged)
        self._cache.recount()

    def close(self) -> None:
        """Leave parameters that live on the device their values; those of the others end with their tiers."""
        self._cache.is_closed = True
        for paged in self.units:
            had_users = paged.num_users
            paged.reset_users(0)
            if paged.is_resident:
                paged.storage.detach_params()
                self._ledger.discharge("device", "param", paged.unit.nbytes if had_users else 0)
            else:
                self._cache.evict(paged)
                paged.storage.orphan_params()
        self.saved_views.close()

    # -- questions and copies --------------------------------------------------------------------------------------

    def storage(self, unit: Unit) -> FlatStorage:
        return self.units.by_index[unit.index].storage

    def is_resident(self, unit: Unit) -> bool:
        return self.units.by_index[unit.index].is_resident

    @runs_outside_modes
    def idle_copy(self, param: nn.Parameter, before_weights_read: Callable[[], None]) -> torch.Tensor | None:
        """Copy a parameter to the CPU for a copy of its module; return None where modules run, or the engine is
        closed."""
        if self._cache.is_closed or self.frames or self._is_in_backward():
            return None
        with self.driver.entered("A copy of a parameter"):
            before_weights_read()
            return self.copies.take(param)
