"""Track the units in use and their users: forward, backward, updates and user code all begin and end the use of a unit
here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiered_zero.concurrency.transfer import Transfer, wait_all
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.planner import PagerLimits
from tiered_zero.tiers.tier import Home, Inventory, Owner, UnitUpdate
from tiered_zero.unit.cache import UnitCache
from tiered_zero.unit.driver import CallPhase, DriverThread, Phase, find_call, is_running
from tiered_zero.unit.guard import offloaded_error
from tiered_zero.unit.offloaded import OffloadedParams, ParamCopies
from tiered_zero.unit.saved_views import SavedViews, TensorMover, changed_weights, refuse_tracing
from tiered_zero.unit.unit import FlatStorage, PagedUnit, StepEvents, UnitState, UnitTable, WeightState


@dataclass(kw_only=True)
class Frame:
    """A module that runs, or the engine's forward: one entry of the pager's stack.

    `thread`: the thread that runs it. `held`: units that stay in use for its whole length, in the pass `pass_name`.
    `faulted`: units of functions that were called in it. If room is short and no view of such a unit is held, the unit
    is evicted, and fetched again when the next function is called with it. `is_inside_hooks`: hooks for saved tensors
    were set when it began. `disables_cast_cache`: autocast's cache is off while it runs. [Note: Casts of weights]"""

    thread: int
    pass_name: str = ""
    held: list[PagedUnit] = field(default_factory=list)
    faulted: list[PagedUnit] = field(default_factory=list)
    is_inside_hooks: bool = False
    disables_cast_cache: bool = False


@dataclass(kw_only=True)
class DirectCall:
    """A call of `module` by the user on `thread`, past the engine. `frame`: the Python frame of torch's call of the
    module; None if the module is compiled. `saving`: the hooks for saved tensors that were set for the call."""

    module: nn.Module
    thread: int
    frame: FrameType | None
    saving: saved_tensors_hooks | None = None


@final
class Pager:
    """Owns the state of every unit. A resident unit is always in use, except while it waits for its update.

    Driver thread, or autograd's threads while the driver waits in backward. Three objects share the units: `cache`
    (which units are on the device), `copies` (copies of parameters for user code) and `saved_views` (what autograd
    saves)."""

    def __init__(
        self,
        runtime: Runtime,
        inventory: Inventory,
        offloaded_params: OffloadedParams,
        limits: PagerLimits,
        mover: TensorMover | None = None,
    ) -> None:
        """`mover`: gets the tensors that autograd saves and that are no views of a unit."""
        self._accelerator = runtime.accelerator
        self._ledger = runtime.ledger
        self._recorder = runtime.recorder
        self._inventory = inventory
        self._limits = limits
        self.offloaded_params = offloaded_params
        self.phase = CallPhase()
        self.driver = DriverThread()
        self.frames: list[Frame] = []
        """The stack of modules that run, the innermost last."""
        self.direct: DirectCall | None = None
        """The direct call that runs, or that an interrupt has ended without its hook."""
        self.loading: list[AbstractContextManager[None]] = []
        """The open blocks of gathered parameters of a load_state_dict() that runs."""
        self.units = UnitTable()
        self.cache = UnitCache(runtime, inventory, limits, self.units)
        self.saved_views = SavedViews(self.units, self._fault_in_saved, mover)
        self.copies = ParamCopies(offloaded_params, runtime, self.driver, self.units, self.cache)
        self.num_uses = 0
        """The number of frames, gathers and copies so far: callers compare it to see whether weights were used in
        between."""
        self._watched: set[PagedUnit] = set()
        """Units whose memory user code was given."""
        self._swapped: dict[tuple[Owner, str], Home] = {}
        """The homes of units after the next `swap_param_buffers`, by unit and kind."""

    # -- set-up ----------------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit, params: Sequence[nn.Parameter], events: StepEvents) -> None:
        """Turn `params` into views of one flat of this unit, without memory, and drop their former bytes. `events`: the
        object that is called before uses of the unit."""
        place = None
        memory: AbstractContextManager[None] = nullcontext()
        if (home := self._inventory.find(unit, "param")) is None:
            self._ledger.charge("device", "param", unit.nbytes)
        else:
            place = self._accelerator.reserve_place(unit.nbytes, self._limits.live_nbytes)
            memory = self._accelerator.unit_memory()
        with memory:
            storage = FlatStorage(unit, params, self._accelerator.device, self, place)
        paged = PagedUnit(
            unit=unit,
            storage=storage,
            is_resident=home is None,
            own=slice(0, unit.numel) if home is None else home.elements(unit),
            params={param: index for index, param in enumerate(params)},
            events=events,
        )
        self.units.add(paged)

    def store(self, unit: Unit, flat: torch.Tensor) -> None:
        """Write `flat`, [P] on the CPU, as the first values of a unit: to its home, or to the device if the unit lives
        there."""
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
        """Make the unit's parameters usable by all that compute launches from now on, and add a user. Pairs with
        `_release`."""
        if not paged.unit.trainable:
            paged.storage.count_references(is_recomputed=pass_name == "backward")
        self._bring(paged, pass_name)
        paged.add_user()

    def _release(self, paged: PagedUnit, pass_name: str) -> None:
        """End one use of the unit. After the last use, forward guards or evicts the unit; backward holds it until its
        memory is needed."""
        paged.remove_user()
        if pass_name != "backward":
            self.cache.retire(paged)

    def _bring(self, paged: PagedUnit, pass_name: str) -> None:
        """Fetch the unit if it is offloaded, wait for its last update, and unguard it. Adds no user."""
        if not paged.is_resident:
            self.cache.note_use(paged, pass_name)
        state = paged.state
        if paged.weights is WeightState.UPDATING:
            raise ModelError(
                f"Unit {paged.unit.name} is used before step(), but its update has begun in backward, as it does where "
                'nothing is clipped or checked. Set "tiered_zero": {"optimizer_in_backward": false} for such a loop.'
            )
        if state is UnitState.IN_USE:
            return
        if state is UnitState.OFFLOADED:
            self.cache.fetch(paged)
        # before the wait: an update under way then has where to put what it computes
        self.cache.prefetch(paged, self.phase)
        try:
            if (unit_update := self._inventory.last_update(paged.unit)) is not None:
                self._wait_update(paged, unit_update)
            if paged.fetch is not None:  # else it was fetched since its last update: what that still writes is its home
                self._wait_fetched(paged.unit, paged.fetch)
        except Exception:
            if paged.fetch is not None:
                self.cache.evict(paged)  # these are not its bytes
            raise
        paged.begin_use()

    def _wait_update(self, paged: PagedUnit, unit_update: UnitUpdate) -> None:
        """Block until the unit's last update is far enough for a use.

        If the unit lives on the device: until the update is written. Else until the new parameters are computed: the
        update does not need the gradients any more, and a fetch knows from where the parameters come to the device.
        Raises the error of an update that has failed by then."""
        if not unit_update.written.done():
            with self._recorder.span("compute", "wait_update", paged.unit.name):
                (unit_update.written if paged.is_resident else unit_update.computed).wait()
        elif paged.is_resident:
            unit_update.written.wait()  # done: returns at once, or raises

    def _wait_fetched(self, unit: Unit, fetch: Transfer) -> None:
        """Order compute after the fetch of the unit. Raises the fetch's error."""
        if fetch.done():
            self._accelerator.wait_on_compute(fetch)
            return
        with self._recorder.span("compute", "wait_param", unit.name):
            self._accelerator.wait_on_compute(fetch)

    @runs_outside_modes
    def begin_gather(self, paged: PagedUnit) -> None:
        """Acquire a unit for a block of `gathered`, until `end_gather`."""
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
        """Hold `units`, and all units that are faulted in inside, until the block ends (also by an exception)."""
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
            self.cache.refuse()
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
        """Close the frame that this thread has opened last; return False if it has none."""
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
                self.cache.retire(paged)

    def is_running(self) -> bool:
        """Return whether a module of the model runs on this thread. Raises ModelError if one runs on another thread."""
        if self.frames:
            self.driver.check("A module's forward")
        return bool(self.frames)

    def is_called_directly(self) -> bool:
        """Return whether the user calls the module whose forward begins past the engine (a direct call)."""
        return not self.frames and self.phase.now is Phase.IDLE and torch._C._current_graph_task_id() == -1

    # -- modules that are called directly, past the engine -------------------------------------------------------------

    def begin_direct(self, module: nn.Module) -> None:
        refuse_tracing()
        self.driver.enter(f"The forward of {type(module).__name__}")
        self.direct = DirectCall(module=module, thread=threading.get_ident(), frame=_find_module_call())

    def save_direct(self) -> None:
        """Save views by name until `end_direct`. Called once the frame of the direct call is open."""
        if self.direct is not None:
            self.direct.saving = self.saved_views.begin()

    def end_direct(self) -> None:
        direct, self.direct = self.direct, None
        if direct is not None and direct.thread == threading.get_ident():  # else that thread has ended, and its hooks
            self.saved_views.end(direct.saving)
            self.driver.leave()

    def runs_directly(self) -> bool:
        """Return whether the caller runs inside of a module that was called directly."""
        return self.direct is not None and is_running(self.direct.frame)

    def ends_direct(self, module: nn.Module) -> bool:
        """Return whether the call of `module` that ends now is the direct call. Called by the module's forward hook."""
        direct = self.direct
        if direct is None or direct.module is not module:
            return False
        return direct.frame is None or direct.frame is _find_module_call()  # else the module runs inside itself

    # -- parameters that functions are called with, and that autograd has saved ----------------------------------------

    @runs_outside_modes
    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        """Fetch the units of `params` together for `function`, which is called with these parameters; the first is
        offloaded.

        Raises ParameterOffloadedError outside of forward and backward. See [Note: Entry points]."""
        paged_units = [self.units.by_param[param] for param in params]
        paged_units[0].events.notice_backward()
        if self.driver.other() is not None or not (self.frames or self._is_in_backward()):
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
        """Raise ParameterOffloadedError for `param` unless its unit is in use or resident. A resident unit that is not
        in use only waits for its update."""
        if paged.state is UnitState.IN_USE or paged.is_resident:
            return
        if self.cache.is_closed:
            self.cache.refuse_closed(paged)
        name = paged.unit.entries[paged.params[param]].param.name
        tier = self._inventory.home(paged.unit, "param").tier.name
        raise offloaded_error(function, name, tier, paged.unit.dtype, self._accelerator.device)

    def _fault_in_saved(self, unit_index: int, version: int | None) -> FlatStorage:
        """Fetch a unit of which autograd unpacks a view, and return its storage. `version`: the unit's version when the
        view was saved. Raises ModelError if the unit's weights have changed since."""
        paged = self.units.by_index[unit_index]
        if torch._C._current_graph_task_id() != self.phase.task:
            paged.events.notice_backward()
        if paged.weights is not WeightState.UPDATING and version not in (None, paged.version):
            raise changed_weights(paged.unit.name)
        self._bring(paged, self.phase.pass_name)
        return paged.storage

    # -- backward --------------------------------------------------------------------------------------------------

    def _is_in_backward(self) -> bool:
        """Return whether autograd runs a backward, or the engine is about to begin one."""
        return self.phase.now is Phase.BACKWARD or torch._C._current_graph_task_id() != -1

    @runs_outside_modes
    def finish_gradients(self, unit: Unit) -> None:
        """Guard or evict a unit that backward holds: all its gradients have arrived, so no later node is expected to
        need it."""
        self.cache.retire(self.units.by_index[unit.index])

    @runs_outside_modes
    def end_pass(self) -> None:
        """Guard or evict every unit without users: forward or backward is over, or has failed."""
        for paged in self.units.by_index.values():
            if paged.state is UnitState.IN_USE and not paged.num_users:
                self.cache.retire(paged)

    # -- updates -------------------------------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Drop what the device holds of trainable units, whose homes are about to change.

        If other code holds a view of a unit's flat, the flat keeps its memory, without values, until the unit's next
        use fetches new values into it."""
        for paged in self.units.by_index.values():
            if paged.unit.trainable:
                self._invalidate(paged)
        self.cache.refuse()

    def invalidate_all(self) -> None:
        """Drop what the device holds of every unit, frozen ones too: all units are about to be loaded.

        A frozen unit that lives on the device keeps its bytes: the program may change them at any time."""
        for paged in self.units:
            if paged.unit.trainable or not paged.is_resident:
                self._invalidate(paged)
            else:
                paged.renew()
        self.cache.refuse()

    def _invalidate(self, paged: PagedUnit) -> None:
        paged.renew()
        if paged.is_resident:
            self.cache.look(paged)
            return
        if paged.num_users:
            raise ModelError(
                f"Unit {paged.unit.name} is in use by tiered_zero.gathered() while a step is about to change it. Leave "
                "the `with` block before step()."
            )
        self.cache.evict(paged)
        if paged.storage.is_full:  # other code holds a view of it
            paged.storage.blank()

    def end_update(self) -> None:
        """Watch resident units in use for changes by user code from here on: the update has given them their new
        values."""
        for paged in self.units.by_index.values():
            if paged.is_resident and paged.state is UnitState.IN_USE:
                paged.storage.begin_watch()

    def begin_back_update(self) -> None:
        """Record the swap of homes that ends a delayed update. The update writes the "param_back" homes while compute
        reads the "param" homes."""
        find, units = self._inventory.find, [paged.unit for paged in self.units if not paged.is_resident]
        homes = [(unit, back, find(unit, "param")) for unit in units if (back := find(unit, "param_back")) is not None]
        self._swapped = {(unit, "param"): back for unit, back, _ in homes}
        self._swapped |= {(unit, "param_back"): home for unit, _, home in homes if home is not None}

    def swap_param_buffers(self) -> None:
        """Swap the "param" and "param_back" homes of each unit; copy the latter to the device for a unit that lives
        there. The caller calls this again after a failure."""
        self.invalidate()
        for paged in self.units:
            if paged.is_resident and (back := self._inventory.find(paged.unit, "param_back")) is not None:
                back.tier.fetch(back.slot, paged.storage.flat).wait()
        self._inventory.move(self._swapped)
        self.end_update()

    def block_for_update(self) -> None:
        """Block use of every trainable unit until the unit's own update completes. Called when the step is taken."""
        begun = {paged for paged in self.units if paged.weights is WeightState.UPDATING}
        self.unblock()
        for paged in self.units:
            if not paged.unit.trainable or paged in begun:
                continue  # what was fetched of those since waits for their updates, which may wait for this step
            self._invalidate(paged)
            if paged.is_resident:
                self.cache.guard(paged)
        self.cache.refuse()

    def block_unit_for_update(self, unit: Unit) -> bool:
        """Refuse any use of a unit until the step is taken, because its update begins in backward; return True. Return
        False, with nothing changed, if the unit is in use."""
        paged = self.units.by_index[unit.index]
        if paged.storage.is_viewed or (paged.num_users and not paged.is_resident):
            return False
        if paged.is_resident:
            self.cache.guard(paged)
        else:
            self.cache.evict(paged)
        paged.renew()
        paged.block()
        return True

    def unblock(self) -> None:
        """Allow use of units that `block_unit_for_update` has blocked: their updates were dropped before they began, or
        the step is taken."""
        for paged in self.units:
            paged.unblock()

    # -- failures and the end --------------------------------------------------------------------------------------

    @runs_outside_modes
    def abort(self) -> None:
        """End every frame, evict units without users, and count all users and bytes anew. Called after a failure, when
        no module runs any more. A unit that a transfer still fetches stays, as if it were prefetched."""
        if any(frame.disables_cast_cache and frame.thread == threading.get_ident() for frame in self.frames):
            torch.set_autocast_cache_enabled(True)
        self.frames.clear()
        self.loading.clear()
        self.copies.end()
        for paged in self.units:
            paged.reset_users(paged.num_gathers + paged.is_resident)
        for paged in self.units:  # `gathered` may be open around the forward that failed
            if paged.num_users == 0 and (paged.fetch is None or paged.fetch.done()):
                self.cache.evict(paged)
        self.cache.recount()
        self.end_direct()
        self.saved_views.abort()

    def close(self) -> None:
        """End the pager. Parameters that live on the device keep their values; the values of all others end with their
        tiers."""
        self.cache.is_closed = True
        for paged in self.units:
            had_users = paged.num_users
            paged.reset_users(0)
            if paged.is_resident:
                paged.storage.detach_params()
                self._ledger.discharge("device", "param", paged.unit.nbytes if had_users else 0)
            else:
                self.cache.evict(paged)
                paged.storage.orphan_params()
        self.saved_views.close()

    # -- user code, past the engine ------------------------------------------------------------------------------------

    def storage(self, unit: Unit) -> FlatStorage:
        return self.units.by_index[unit.index].storage

    def is_resident(self, unit: Unit) -> bool:
        return self.units.by_index[unit.index].is_resident

    @runs_outside_modes
    def watch(self, param: nn.Parameter) -> None:
        """Copy the values of a parameter in use, whose memory user code is about to get. Compare the parameters watched
        before, if no view of their unit is left. [Note: Writes through .data]"""
        for paged in [other for other in self._watched if not (other.num_writers or other.storage.is_viewed)]:
            self.cache.look(paged)
            self._watched.discard(paged)
        paged = self.units.by_param[param]
        if paged.state is UnitState.IN_USE:
            paged.storage.watch_values(paged.params[param])
            self._watched.add(paged)

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the parameter on the CPU while a state_dict is taken; else return None."""
        return self.copies.take(param) if self.copies.is_open else None

    @runs_outside_modes
    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the parameter on the CPU, for a copy of its module; return None if modules run, or if the
        engine is closed."""
        if self.cache.is_closed or self.frames or self._is_in_backward():
            return None
        with self.driver.entered("A copy of a parameter"):
            self.units.by_param[param].events.before_weights_read()
            return self.copies.take(param)


def _find_module_call() -> FrameType | None:
    return find_call(nn.Module._call_impl.__code__)


@final
class WholeWeights:
    """Gathers units of which each rank updates its shard, in place. So weights are whole between steps, and one rank
    alone may evaluate or save them. Driver thread.

    A unit is gathered in its own flat, without other memory, however large it is. `units`: those that the optimizer
    steps, in static order; empty if a shard is the whole unit, or if units are gathered for each use."""

    def __init__(self, runtime: Runtime, pager: Pager, units: Sequence[Unit]) -> None:
        self._accelerator = runtime.accelerator
        self._collectives, self._recorder = runtime.collectives, runtime.recorder
        self._pager = pager
        self.units = units

    def invalidate_all(self) -> None:
        """Drop what the device holds of every unit."""
        self._pager.invalidate_all()

    def end_update(self) -> None:
        """Gather every unit after its shards were changed otherwise than by a step, and record the values of resident
        units as new. Blocks; raises RankError."""
        if self.units:
            with self._recorder.span("compute", "wait_param"):
                wait_all([self.start(unit) for unit in self.units])
        self._pager.end_update()

    def start(self, unit: Unit) -> Transfer:
        """Start to fill the unit with the shards of all ranks; this rank's shard has its new values already."""
        flat = self._pager.storage(unit).flat.data  # its version counter is its own: saved views stay valid
        shard = unit.shard(self._collectives.rank)
        own, name = flat[shard.start : shard.stop], f"the parameters of {unit.name}"
        after = [self._accelerator.record_compute()]  # what may still read the shards of before
        return self._collectives.all_gather(flat, own, name, after=after, bounds=unit.bounds)
