"""Read and write weights at their homes as plain CPU tensors: for state_dict(), copies of modules, and changes by user
code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import FrameType
from typing import final

import torch
from torch import nn

from tiered_zero.errors import BudgetError, RankError
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.hardware.memory.host_memory import StagingPool
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.collectives import agree
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.tier import Inventory, read_slot, write_slot
from tiered_zero.unit.cache import UnitCache
from tiered_zero.unit.driver import DriverThread, find_call, is_running
from tiered_zero.unit.unit import PagedUnit, UnitState, UnitTable


@final
class OffloadedParams:
    """Reads and writes a unit's parameters at their home. Used on the driver thread; calls block. If homes hold shards,
    every rank must make the same calls."""

    def __init__(
        self,
        inventory: Inventory,
        staging: StagingPool | None,
        runtime: Runtime,
        on_change: Callable[[Unit, torch.Tensor, torch.Tensor | None], None],
        cuts: Callable[[Unit], Sequence[int]] | None = None,
    ) -> None:
        """`on_change(unit, flat, old)`: updates the masters after user code has changed parameters. `flat`: the new
        values, [P] on the CPU. `old`: the values before the change; None for a frozen unit, or if `cuts` is None.

        `cuts(unit)`: returns the index of the first element of each part of the unit that the update reads. `cuts` is
        None if the update reads no parameters."""
        self._inventory, self._staging = inventory, staging
        self._accelerator, self._ranks = runtime.accelerator, runtime.collectives
        self._on_change, self._cuts = on_change, cuts

    def read(self, unit: Unit) -> torch.Tensor:
        """Return a copy of the values at a unit's home, with the shards of all ranks: [P] of its dtype, on the CPU."""
        own = self._read_home(unit)
        flat = own if own.numel() == unit.numel else torch.empty(unit.numel, dtype=unit.dtype)
        if flat is not own:
            self._ranks.all_gather(flat, own, f"unit {unit.name}", order=f"a copy of {unit.name}").wait()
        return flat

    def read_own(self, unit: Unit) -> torch.Tensor:
        """Return this rank's values at a unit's home as a flat of the whole unit, on the CPU. Elements of other ranks
        are undefined."""
        own, elements = self._read_home(unit), self._inventory.home(unit, "param").elements(unit)
        if own.numel() == unit.numel:
            return own
        flat = torch.empty(unit.numel, dtype=unit.dtype)
        flat[elements] = own
        return flat

    def _read_home(self, unit: Unit) -> torch.Tensor:
        home = self._inventory.home(unit, "param")
        return read_slot(home, 0, home.slot.nbytes, self._staging).view(unit.dtype)

    def store(self, unit: Unit, flat: torch.Tensor) -> None:
        """Write `flat`, [P] on the CPU, to the unit's home. If the home holds a shard, write only this rank's shard."""
        home = self._inventory.home(unit, "param")
        own = home.elements(unit)
        starts = sorted({own.start, *(self._cuts(unit) if self._cuts is not None else ())})
        for start, stop in pairwise([*starts, own.stop]):  # the update verifies one write's checksum for each part
            write_slot(home, (start - own.start) * unit.itemsize, flat[start:stop], self._staging)

    # -- changes by user code ------------------------------------------------------------------------------------------

    @runs_outside_modes
    def remember(self, paged: PagedUnit) -> torch.Tensor | None:
        """Return a CPU copy of a unit before user code changes the unit; None if `write_back` needs no copy."""
        return paged.storage.flat.to("cpu", copy=True) if self._cuts is not None and paged.unit.trainable else None

    @contextmanager
    def changing(self, paged: PagedUnit) -> Iterator[None]:
        """Run the block, in which user code changes the unit. At its end the ranks compare whether the code has raised.
        If it has raised on some ranks only, the run ends: these ranks raise the code's error, the others raise
        RankError. An interrupt ends the run on all ranks."""
        try:
            yield
        except Exception as error:
            with suppress(RankError):  # the run has ended, and the block's own error says more
                self._end_change(paged, f"{type(error).__name__}: {error}")
            raise
        except GeneratorExit:  # the block was dropped without an end, as torch does when load_state_dict() raises
            self._ranks.fail("an error ended gathered() or load_state_dict(); its own output says which")
            raise
        except BaseException as interrupt:
            self._ranks.fail(f"{type(interrupt).__name__} inside of gathered()")
            raise
        self._end_change(paged, "")

    def _end_change(self, paged: PagedUnit, error: str) -> None:
        found = agree(self._ranks, f"the end of gathered() of {paged.unit.name}", lambda: error)
        failed = [rank for rank, text in enumerate(found) if text]
        if failed and len(failed) < len(found):
            message = f"the code inside of gathered() has raised on rank {failed[0]} alone: {found[failed[0]]}"
            self._ranks.fail(message)  # some units may be written already, and would differ between ranks
            if not error:
                raise RankError(f"Rank {failed[0]} failed, which ends the run on all {len(found)} ranks: {message}")

    @runs_outside_modes
    def write_back(self, paged: PagedUnit, old: torch.Tensor | None, modifier_rank: int = 0) -> None:
        """Write a changed unit to its home, unless it is resident, and update its masters. All ranks must call this,
        and all get the values of `modifier_rank`. `old`: what `remember` returned before the change. Call
        `TrainStep.before_weights_write` first."""
        unit, storage = paged.unit, paged.storage
        paged.renew()
        storage.reattach(keep=True)
        try:
            if self._ranks.world_size > 1:
                flat = self._accelerator.alias(storage.flat)  # gloo's threads hold it a little longer than the call
                self._ranks.broadcast(flat, modifier_rank, f"changed values of {unit.name}")
                storage.begin_watch()
            value = storage.flat.to("cpu")
            if not paged.is_resident:
                self.store(unit, value)
            self._on_change(unit, value, old)
        except Exception:
            paged.mark_stale()
            raise


@final
class ParamCopies:
    """Makes CPU copies of parameters, for state_dict() and for copies of modules. Used on the driver thread. If homes
    hold shards, every rank must make the same calls."""

    def __init__(
        self,
        offloaded_params: OffloadedParams,
        runtime: Runtime,
        driver: DriverThread,
        units: UnitTable,
        cache: UnitCache,
    ) -> None:
        self._offloaded_params, self._ranks, self._driver = offloaded_params, runtime.collectives, driver
        self._units, self._cache = units, cache
        self._by_param: dict[nn.Parameter, torch.Tensor] = {}
        self._last: list[tuple[Unit, int, torch.Tensor]] = []
        """Flats kept for later copies: (unit, its version, flat). They belong to the module read last and to modules
        that contain it. Cleared when a state_dict ends or a module begins to run."""
        self._depth = 0
        self.call: FrameType | None = None
        """The Python frame of the outermost `nn.Module.state_dict` call; None if there is none."""

    @property
    def is_open(self) -> bool:
        """Whether a state_dict is being taken."""
        return self._depth > 0

    def start(self, before_weights_read: Callable[[], None], params: Iterable[nn.Parameter]) -> None:
        """Begin the state_dict of a module. For the outermost module, call `before_weights_read`, and raise BudgetError
        if whole copies of sharded `params` do not fit into host memory."""
        if self.was_broken_off():
            self._driver.was_broken_off = True
            self.end()
        if not self._depth:
            with self._driver.entered("state_dict()"):
                before_weights_read()
                self._check_room(params)
                self._driver.enter("state_dict()")
            self.call = find_call(nn.Module.state_dict.__code__)
        else:
            self._driver.check("state_dict()")
        self._depth += 1

    def was_broken_off(self) -> bool:
        """Return whether an exception has ended a state_dict without a call of `end`."""
        return self.call is not None and not is_running(self.call)

    def _check_room(self, params: Iterable[nn.Parameter]) -> None:
        """Raise BudgetError on all ranks, if a host lacks free memory for whole copies of sharded `params`."""
        places = [
            (paged, paged.unit.entries[paged.params[p]]) for p in params if (paged := self._units.by_param.get(p))
        ]
        if all(paged.own == slice(0, paged.unit.numel) for paged, _ in places):
            return
        needed_nbytes = sum(entry.param.numel * paged.unit.itemsize for paged, entry in places)
        shares = self._ranks.exchange(str(available_host_nbytes() // local_world_size()).encode(), "state_dict()")
        free_nbytes = min(map(int, shares))
        if needed_nbytes > free_nbytes:
            raise BudgetError(
                f"state_dict() makes a whole copy of {format_nbytes(needed_nbytes)} of parameters on every rank; "
                f"found {format_nbytes(free_nbytes)} of host memory free for each. engine.save_checkpoint() writes "
                "shards as they are; a module's state_dict(), or tiered_zero.gathered(module), takes a part."
            )

    def stop(self) -> None:
        if self._depth <= 1:
            self.end()
        else:
            self._depth -= 1

    def end(self) -> None:
        """End a state_dict, and drop its copies. Also called after an exception has interrupted a state_dict."""
        if self._depth:
            self._driver.leave()
        self._depth = 0
        self.call = None
        self._by_param.clear()
        self._last.clear()

    @runs_outside_modes
    def take(self, param: nn.Parameter) -> torch.Tensor:
        """Return a copy of the parameter on the CPU, in its shape. In one state_dict, tied names get the same
        tensor."""
        if param in self._by_param:
            return self._by_param[param]
        if (paged := self._units.by_param.get(param)) is None:  # it has no elements
            return param.detach().to("cpu", copy=True)
        flat = paged.storage.flat if paged.state is UnitState.IN_USE or paged.is_resident else self._read(paged)
        entry = paged.unit.entries[paged.params[param]]
        value = entry.param.view(flat[entry.start : entry.stop]).to("cpu", copy=True)
        if self._depth:
            self._by_param[param] = value
        return value

    def _read(self, paged: PagedUnit) -> torch.Tensor:
        """Return the values at the unit's home, [P] on the CPU. Reuse an earlier read if the values have not changed
        since."""
        if self._cache.is_closed:
            self._cache.refuse_closed(paged)
        for unit, version, flat in self._last:
            if unit is paged.unit and version == paged.version:
                return flat
        try:
            flat = self._offloaded_params.read(paged.unit)
        except Exception:
            self.end()
            raise
        around = [each for each in self._last if f"{paged.unit.module}.".startswith(f"{each[0].module}.")]
        self._last = [*around, (paged.unit, paged.version, flat)]
        return flat
