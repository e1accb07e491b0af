"""Track the units in use and their users. Forward, backward and user code begin and end each use of a unit here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
    """A running module, or the engine's forward: one entry of the pager's stack."""

    thread: int
    pass_name: str = ""
    held: list[PagedUnit] = field(default_factory=list)
    """Units that this frame keeps in use, for the pass `pass_name`, until the module ends."""
    faulted: list[PagedUnit] = field(default_factory=list)
    """Units that were fetched because the module called a function with their parameters. They may be evicted before
    the module ends."""
    is_inside_hooks: bool = False
    """Whether `SavedViews.end_inside` must be called when the module ends."""
    disables_cast_cache: bool = False
    """Whether this frame has turned autocast's cache off, until the module ends. [Note: Casts of weights]"""


@dataclass(kw_only=True)
class DirectCall:
    """A direct call: the user calls `module` instead of the engine. `frame`: the Python frame of torch's `_call_impl`;
    None if the module is compiled. `saving`: the saved-tensor hooks set for this call."""

    module: nn.Module
    thread: int
    frame: FrameType | None
    saving: saved_tensors_hooks | None = None


@final
class Pager:
    """Owns the state of every unit. A resident unit is always in use, except while it waits for its update. Used on the
    driver thread, or on autograd's threads while the driver waits in backward."""

    def __init__(
        self,
        runtime: Runtime,
        inventory: Inventory,
        offloaded_params: OffloadedParams,
        limits: PagerLimits,
        mover: TensorMover | None = None,
    ) -> None:
        """`mover`: moves tensors that autograd saves off the device, except views of units. None: no tensor is
        moved."""
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
        """The running call of a module that the user called instead of the engine; None if there is none. If an
        interrupt ends the call before its forward hook, the field stays set."""
        self.loading: list[AbstractContextManager[None]] = []
        """The open `gathered` blocks of a running load_state_dict()."""
        self.units = UnitTable()
        self.cache = UnitCache(runtime, inventory, limits, self.units)
        self.saved_views = SavedViews(self.units, self._fault_in_saved, mover)
        self.copies = ParamCopies(offloaded_params, runtime, self.driver, self.units, self.cache)
        self.num_uses = 0
        """The number of uses of weights so far: calls of modules, `gathered` blocks (one use per unit), and state_dicts
        of modules."""
        self._watched: set[PagedUnit] = set()
        """Units in which user code has got the memory of a parameter, as a NumPy array or an address."""
        self._swapped: dict[tuple[Owner, str], Home] = {}
        """(unit, kind) -> the home that the unit gets for this kind in the next `swap_param_buffers`."""

    # -- set-up ----------------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit, params: Sequence[nn.Parameter], events: StepEvents) -> None:
        """Give the unit a new flat, which has no memory yet, and make `params` views of it. Their former bytes are
        dropped."""
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
        """Write a unit's first values to its home, or to the device if the unit is resident. `flat`: the values, [P] on
        the CPU."""
        paged = self.units.by_unit[unit]
        if not paged.is_resident:
            self.offloaded_params.store(unit, flat)
            return
        paged.storage.fill()
        paged.storage.flat.copy_(flat)
        paged.add_user()
        paged.begin_use()

    # -- use -------------------------------------------------------------------------------------------------------

    def _acquire(self, paged: PagedUnit, pass_name: str) -> None:
        """Add a user, and make the unit usable for compute launched from now on. Pairs with `_release`."""
        if not paged.unit.trainable:
            paged.storage.count_references(is_recomputed=pass_name == "backward")
        self._bring(paged, pass_name)
        paged.add_user()

    def _release(self, paged: PagedUnit, pass_name: str) -> None:
        """Remove a user. Then guard or evict the unit if it is paged and has no users. If `pass_name` is "backward",
        leave the unit in use."""
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
        # before the wait: a running update then copies new parameters to these fetches from its staging memory
        self.cache.prefetch(paged, self.phase)
        try:
            if (unit_update := self._inventory.last_update(paged.unit)) is not None:
                self._wait_update(paged, unit_update)
            if paged.fetch is not None:  # else its bytes are here already; the update may still write its home
                self._wait_fetched(paged.unit, paged.fetch)
        except Exception:
            if paged.fetch is not None:
                self.cache.evict(paged)  # it holds no valid bytes
            raise
        paged.begin_use()

    def _wait_update(self, paged: PagedUnit, unit_update: UnitUpdate) -> None:
        """Wait until `unit_update` has written a resident unit, or has computed a paged unit. Raises the update's
        error. For a paged unit the fetch may raise the error instead."""
        if not unit_update.written.done():
            # a fetch takes computed parameters from staging memory; it raises the error of an update that has failed
            with self._recorder.span("compute", "wait_update", paged.unit.name):
                (unit_update.written if paged.is_resident else unit_update.computed).wait()
        elif paged.is_resident:
            unit_update.written.wait()  # done: returns at once, or raises

    def _wait_fetched(self, unit: Unit, fetch: Transfer) -> None:
        """Make compute wait for the fetch of the unit. Raises the fetch's error."""
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

    def enter_frame(self, units: Sequence[Unit]) -> None:
        """Open a frame that holds `units` in use until `exit_frame`."""
        is_outermost, thread = not self.frames, threading.get_ident()
        if is_outermost or self.frames[-1].thread != thread:  # else this thread was admitted already
            self.driver.check("A module's forward")
        self.num_uses += 1
        self.frames.append(frame := Frame(thread=thread))
        if is_outermost:
            self.copies.end()  # ends a state_dict whose own hooks have raised
            self.cache.refuse()
        if units:
            frame.pass_name = self.phase.pass_name
        for unit in units:
            paged = self.units.by_unit[unit]
            self._acquire(paged, frame.pass_name)
            frame.held.append(paged)
        if not torch.is_grad_enabled() and torch.is_autocast_cache_enabled():  # [Note: Casts of weights]
            frame.disables_cast_cache = not all(paged.is_resident for paged in frame.held)
            torch.set_autocast_cache_enabled(not frame.disables_cast_cache)
        frame.is_inside_hooks = self.saved_views.begin_module()

    def exit_frame(self) -> bool:
        """Remove the innermost frame (a running module), and release the frame's units. Return False if there is no
        frame, or if another thread opened it."""
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
        """Return whether a module of the model runs. Raises ModelError if one runs while another thread is inside the
        engine."""
        if self.frames:
            self.driver.check("A module's forward")
        return bool(self.frames)

    def is_called_directly(self) -> bool:
        """Return whether a forward that begins now is a direct call: no engine call, module or backward runs."""
        return not self.frames and self.phase.now is Phase.IDLE and torch._C._current_graph_task_id() == -1

    # -- modules that the user calls directly --------------------------------------------------------------------------

    def begin_direct(self, module: nn.Module) -> None:
        refuse_tracing()
        self.driver.enter(f"The forward of {type(module).__name__}")
        self.direct = DirectCall(module=module, thread=threading.get_ident(), frame=_find_module_call())

    def save_direct(self) -> None:
        """Set the hooks of `SavedViews` if the user calls a module directly (see `DirectCall`). `end_direct` removes
        the hooks. Call this after the call's frame is open."""
        if self.direct is not None:
            self.direct.saving = self.saved_views.begin()

    def end_direct(self) -> None:
        direct, self.direct = self.direct, None
        if direct is not None and direct.thread == threading.get_ident():  # else that thread and its hooks have ended
            self.saved_views.end(direct.saving)
            self.driver.leave()

    def runs_directly(self) -> bool:
        """Return whether the caller runs inside a module that the user called directly; False for a compiled module."""
        return self.direct is not None and is_running(self.direct.frame)

    def ends_direct(self, module: nn.Module) -> bool:
        """Return whether the call of `module` that ends now is the user's direct call (see `DirectCall`). Called by the
        module's forward hook."""
        direct = self.direct
        if direct is None or direct.module is not module:
            return False
        return direct.frame is None or direct.frame is _find_module_call()  # else the module runs inside itself

    # -- parameters that functions are called with, and that autograd has saved ----------------------------------------

    @runs_outside_modes
    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        """Fetch the units of `params`, which are arguments of `function`. The first parameter is offloaded. Outside of
        forward and backward, or while the engine admits only another thread, raise ParameterOffloadedError if a unit is
        neither in use nor resident. [Note: Entry points]"""
        paged_units = [self.units.by_param[param] for param in params]
        paged_units[0].events.notice_backward()
        if self.driver.other() is not None or not (self.frames or self._is_in_backward()):
            for param, paged in zip(params, paged_units, strict=True):
                self._refuse_if_offloaded(param, paged, function)
        for paged in paged_units:  # as users, so that no fetch evicts one of the others
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
        """Raise ParameterOffloadedError for `param`, unless its unit is in use or resident."""
        if paged.state is UnitState.IN_USE or paged.is_resident:
            return
        if self.cache.is_closed:
            self.cache.refuse_closed(paged)
        name = paged.unit.entries[paged.params[param]].param.name
        tier = self._inventory.home(paged.unit, "param").tier.name
        raise offloaded_error(function, name, tier, paged.unit.dtype, self._accelerator.device)

    def _fault_in_saved(self, unit: Unit, version: int | None) -> FlatStorage:
        """Fetch a unit for backward, which needs a view that autograd has saved. Return the unit's storage. `version`:
        the unit's version when the view was saved; None: accept any. Raises ModelError if the unit's weights have
        changed since."""
        paged = self.units.by_unit[unit]
        if torch._C._current_graph_task_id() != self.phase.task:
            paged.events.notice_backward()
        if paged.weights is not WeightState.UPDATING and version not in (None, paged.version):
            raise changed_weights(paged.unit.name)
        self._bring(paged, self.phase.pass_name)
        return paged.storage

    # -- backward --------------------------------------------------------------------------------------------------

    def _is_in_backward(self) -> bool:
        """Return whether `engine.backward()` runs, or autograd runs a backward on this thread."""
        return self.phase.now is Phase.BACKWARD or torch._C._current_graph_task_id() != -1

    @runs_outside_modes
    def finish_gradients(self, unit: Unit) -> None:
        """Guard or evict a paged unit without users. Called when all its gradients of a backward have arrived."""
        self.cache.retire(self.units.by_unit[unit])

    @runs_outside_modes
    def end_pass(self) -> None:
        """Guard or evict every paged unit that is in state IN_USE but has no users. Called after a forward or
        backward."""
        for paged in self.units.by_unit.values():
            if paged.state is UnitState.IN_USE and not paged.num_users:
                self.cache.retire(paged)

    # -- updates -------------------------------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Prepare all trainable units for new values. Evict paged units; resident units will be changed in place.
        Raises ModelError if a paged unit has users, or if user code has changed parameters but not their homes."""
        for paged in self.units.by_unit.values():
            if paged.unit.trainable:
                self._invalidate(paged)
        self.cache.refuse()

    def invalidate_all(self) -> None:
        """Prepare all units, frozen ones too, for a load of their values. Raises ModelError as `invalidate` does, but
        does not check frozen resident units for changes by user code."""
        for paged in self.units:
            if paged.unit.trainable or not paged.is_resident:
                self._invalidate(paged)
            else:
                paged.renew()
        self.cache.refuse()

    def _invalidate(self, paged: PagedUnit) -> None:
        paged.renew()
        if paged.is_resident:
            self.cache.check_for_writes(paged)
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
        """Begin to notice changes that user code makes to resident units in use. Called after an update or load of the
        units' values."""
        for paged in self.units.by_unit.values():
            if paged.is_resident and paged.state is UnitState.IN_USE:
                paged.storage.begin_watch()

    def begin_back_update(self) -> None:
        """Record the homes that `swap_param_buffers` will swap. The delayed update writes the "param_back" homes while
        compute reads the "param" homes."""
        find, units = self._inventory.find, [paged.unit for paged in self.units if not paged.is_resident]
        homes = [(unit, back, find(unit, "param")) for unit in units if (back := find(unit, "param_back")) is not None]
        self._swapped = {(unit, "param"): back for unit, back, _ in homes}
        self._swapped |= {(unit, "param_back"): home for unit, _, home in homes if home is not None}

    def swap_param_buffers(self) -> None:
        """Swap the "param" and "param_back" homes of paged units; copy the "param_back" home of a resident unit to the
        device. If this raises, call it again before weights are used."""
        self.invalidate()
        for paged in self.units:
            if paged.is_resident and (back := self._inventory.find(paged.unit, "param_back")) is not None:
                back.tier.fetch(back.slot, paged.storage.flat).wait()
        self._inventory.move(self._swapped)
        self.end_update()

    def block_for_update(self) -> None:
        """Guard or evict every trainable unit, so that its next use waits for its own update. Called in step(). A unit
        whose update began in backward is guarded or evicted already: only let it be used again (see `unblock`)."""
        begun = {paged for paged in self.units if paged.weights is WeightState.UPDATING}
        self.unblock()
        for paged in self.units:
            if not paged.unit.trainable or paged in begun:
                continue  # its fetch, if one has begun, waits for its update, which may wait for this step
            self._invalidate(paged)
            if paged.is_resident:
                self.cache.guard(paged)
        self.cache.refuse()

    def block_unit_for_update(self, unit: Unit) -> bool:
        """Make every use of a unit raise until step() is called, because its update begins in backward. Return False,
        and change nothing, if other code holds a view of the unit, or if a paged unit has users."""
        paged = self.units.by_unit[unit]
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
        """Let units that `block_unit_for_update` blocked be used again. Called in step(), or when updates are dropped
        before they have begun."""
        for paged in self.units:
            paged.unblock()

    # -- failures and the end --------------------------------------------------------------------------------------

    @runs_outside_modes
    def abort(self) -> None:
        """Clear the stack of running modules, evict units without users, and count users and bytes anew. Called when a
        forward has failed or a step is dropped; no module runs then. Does not evict a unit that a transfer still
        fetches."""
        if any(frame.disables_cast_cache and frame.thread == threading.get_ident() for frame in self.frames):
            torch.set_autocast_cache_enabled(True)
        self.frames.clear()
        self.loading.clear()
        self.copies.end()
        for paged in self.units:
            paged.reset_users(paged.num_gathers + paged.is_resident)
        for paged in self.units:  # those of an open `gathered` block keep their users
            if paged.num_users == 0 and (paged.fetch is None or paged.fetch.done()):
                self.cache.evict(paged)
        self.cache.recount()
        self.end_direct()
        self.saved_views.abort()

    def close(self) -> None:
        """End the pager. Resident parameters keep their values; all others are lost with their tiers."""
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

    # -- user code -----------------------------------------------------------------------------------------------------

    def storage(self, unit: Unit) -> FlatStorage:
        return self.units.by_unit[unit].storage

    def is_resident(self, unit: Unit) -> bool:
        return self.units.by_unit[unit].is_resident

    @runs_outside_modes
    def watch(self, param: nn.Parameter) -> None:
        """Copy the values of a parameter in use before user code gets its memory. [Note: Writes through .data]"""
        # end the watch of other units that have no views: compare with their copies, and drop these
        for paged in [other for other in self._watched if not (other.num_writers or other.storage.is_viewed)]:
            self.cache.check_for_writes(paged)
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
        """Return a copy of the parameter on the CPU; None in forward and backward, and after the engine is closed."""
        if self.cache.is_closed or self.frames or self._is_in_backward():
            return None
        with self.driver.entered("A copy of a parameter"):
            self.units.by_param[param].events.before_weights_read()
            return self.copies.take(param)


def _find_module_call() -> FrameType | None:
    return find_call(nn.Module._call_impl.__code__)


@final
class WholeWeights:
    """Gathers units after an update or a load, in which each rank has changed only its shard. Used on the driver
    thread. `units`: if ranks shard the state but not the parameters, all units that the optimizer steps, in static
    order; otherwise empty."""

    def __init__(self, runtime: Runtime, pager: Pager, units: Sequence[Unit]) -> None:
        self._accelerator = runtime.accelerator
        self._collectives, self._recorder = runtime.collectives, runtime.recorder
        self.pager = pager
        self.units = units

    def end_update(self) -> None:
        """Gather every unit of `units` and wait for it, then call `Pager.end_update`. Raises RankError."""
        if self.units:
            with self._recorder.span("compute", "wait_param"):
                wait_all([self.start(unit) for unit in self.units])
        self.pager.end_update()

    def start(self, unit: Unit) -> Transfer:
        """Start to gather the shards of all ranks into the unit's flat, which holds this rank's new shard already."""
        flat = self.pager.storage(unit).flat.data  # has another version counter, so saved views stay valid
        shard = unit.shard(self._collectives.rank)
        own, name = flat[shard.start : shard.stop], f"the parameters of {unit.name}"
        after = [self._accelerator.record_compute()]  # compute may still read the earlier shards
        return self._collectives.all_gather(flat, own, name, after=after, bounds=unit.bounds)
