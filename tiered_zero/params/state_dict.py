"""CPU copies of parameters, for state_dict() and for copies of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import nn

from tiered_zero.params.driver_thread import DriverThread
from tiered_zero.params.offloaded_params import OffloadedParams
from tiered_zero.params.unit_state import PagedUnit


@final
class ParamCopies:
    """Reads each unit once for copies that come in a row. Driver thread."""

    def __init__(self, offloaded_params: OffloadedParams, driver: DriverThread) -> None:
        self._offloaded_params = offloaded_params
        self._driver = driver
        self._by_param: dict[nn.Parameter, torch.Tensor] = {}
        self._last: tuple[int, int, torch.Tensor] | None = None
        """Until the next frame: the unit read last, its version and its flat."""
        self._depth = 0

    @property
    def is_open(self) -> bool:
        """Whether a state_dict is being taken."""
        return self._depth > 0

    def start(self, before_weights_read: Callable[[], None]) -> None:
        """Begin a module's state_dict; those of its children begin and end inside."""
        if not self._depth:
            with self._driver.entered("state_dict()"):
                before_weights_read()
                self._driver.enter("state_dict()")
        self._depth += 1

    def stop(self) -> None:
        if self._depth <= 1:
            self.end()
        else:
            self._depth -= 1

    def end(self) -> None:
        """End also a state_dict that was interrupted: the next one waits for updates again, and copies anew."""
        if self._depth:
            self._driver.leave()
        self._depth = 0
        self._by_param.clear()
        self._last = None

    def take(self, param: nn.Parameter, paged: PagedUnit, on_device: bool) -> torch.Tensor:
        """Copy a parameter to the CPU, in its shape; tied names get the same tensor while a state_dict is taken.
        `on_device`: the bytes are there."""
        if param in self._by_param:
            return self._by_param[param]
        index = paged.params[param]
        if on_device:
            value = paged.storage.entry_view(index).to("cpu", copy=True)
        else:
            key = paged.unit.index, paged.version
            if self._last is None or self._last[:2] != key:
                try:
                    self._last = *key, self._offloaded_params.read(paged.unit)
                except BaseException:
                    self.end()
                    raise
            entry = paged.unit.entries[index]
            value = entry.param.view(self._last[2][entry.start : entry.stop]).clone()
        if self._depth:
            self._by_param[param] = value
        return value
