"""CPU copies of parameters, for state_dict() and for copies of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import final

import torch
from torch import nn

from tiered_zero.errors import BudgetError
from tiered_zero.hardware.device.outside_modes import runs_outside_modes
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.layout.flat import Unit
from tiered_zero.sizes import format_nbytes
from tiered_zero.unit.driver_thread import DriverThread, find_call, is_running
from tiered_zero.unit.offloaded_params import OffloadedParams
from tiered_zero.unit.unit_cache import UnitCache
from tiered_zero.unit.unit_state import PagedUnit, UnitState, UnitTable


@final
@dataclass(eq=False, repr=False)
class ParamCopies:
    """Reads each unit once for copies that come in a row. Driver thread. Where a home holds a shard, every rank makes
    the same calls."""

    _offloaded_params: OffloadedParams
    _ranks: Collectives
    _driver: DriverThread
    _units: UnitTable
    _cache: UnitCache
    _by_param: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict, init=False)
    _last: list[tuple[Unit, int, torch.Tensor]] = field(default_factory=list, init=False)
    """Until the next frame: the unit read last, its version and its flat; before it those of the modules around its
    own, whose parameters come between others."""
    _depth: int = field(default=0, init=False)
    call: FrameType | None = field(default=None, init=False)
    """The frame of torch's call that takes a state_dict."""

    @property
    def is_open(self) -> bool:
        """Whether a state_dict is being taken."""
        return self._depth > 0

    def start(self, before_weights_read: Callable[[], None], params: Iterable[nn.Parameter]) -> None:
        """Begin a module's state_dict of `params`; those of its children begin and end inside. Raises BudgetError where
        shards are gathered and host memory has no room for the whole."""
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
        """Whether an interrupt has ended a state_dict."""
        return self.call is not None and not is_running(self.call)

    def _check_room(self, params: Iterable[nn.Parameter]) -> None:
        """Every rank makes a whole copy: ranks of one host share what it has free, and all go on or none does."""
        places = [
            (paged, paged.unit.entries[paged.params[p]]) for p in params if (paged := self._units.by_param.get(p))
        ]
        if not any(self._offloaded_params.is_part(paged.unit) for paged, _ in places):
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
        """End also a state_dict that was broken off: the next one waits for updates again, and copies anew."""
        if self._depth:
            self._driver.leave()
        self._depth = 0
        self.call = None
        self._by_param.clear()
        self._last.clear()

    @runs_outside_modes
    def take(self, param: nn.Parameter) -> torch.Tensor:
        """Copy a parameter to the CPU, in its shape, from wherever the bytes are; tied names get the same tensor while
        a state_dict is taken."""
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
        """Return the flat of an offloaded unit, from the last reads if it is the same."""
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
