"""Notice changes of a unit's parameters that its home does not have.

[Note: Writes through .data]
A change in place moves the parameter's version counter, or the flat's where a node of backward makes it in what forward
saved. `param.data.mul_()` moves none, nor does a NumPy array over `param.detach()`. So where a parameter in use gives
user code its memory (unit/param_in_use.py), its values are copied first, and compared bit for bit where the use ends,
or sooner, once nothing holds a view any more. What never asks for the memory costs nothing; what does, a copy and a
comparison. A view that is kept longer is watched as long.
Not seen: writes through `.data` of a view that indexing did not make (`param.t().data`), through an address kept from
earlier, and through a view while its unit is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import final

import torch
from torch import nn

_version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of the same size as an element: NaN differs from itself. int64 for elements of 8 bytes or more."""


@final
class ParamWatch:
    """The versions and values of one unit's parameters as a use began. Driver thread.

    `places`: each parameter's elements of the flat.
    """

    def __init__(self, params: Sequence[nn.Parameter], places: Sequence[slice]) -> None:
        self._params, self._places = params, places
        self._flat = torch.empty(0)
        self._versions = [0] * len(params)
        self._flat_version = 0
        self.values: dict[int, torch.Tensor] = {}
        """Of parameters whose memory user code was given, by index, until no view of it is left."""

    def attach(self, flat: torch.Tensor) -> None:
        """Watch this flat, 1-D, in place of an earlier one. It is empty."""
        self._flat = flat

    def begin(self) -> None:
        """Compare with the parameters of now from here on."""
        self._versions = list(map(_version_of, self._params))
        self._flat_version = self._flat._version
        if self.values:
            self.values = {index: self._words(index).clone() for index in self.values}

    def copy_values(self, index: int) -> None:
        """User code is about to get the memory of the parameter."""
        if index not in self.values:
            self.values[index] = self._words(index).clone()

    def find_change(self, key: int) -> int | None:
        """Return the index of a parameter that was changed since `begin`, or given other memory than that of the
        storage `key`; -1 where only the unit is known."""
        for index, (param, version) in enumerate(zip(self._params, self._versions, strict=True)):
            if param._version != version or param.untyped_storage()._cdata != key:
                return index
        for index, values in self.values.items():
            if not torch.equal(self._words(index), values):
                return index
        return -1 if self._flat._version != self._flat_version else None

    def _words(self, index: int) -> torch.Tensor:
        values = self._flat[self._places[index]]
        return values.view(_WORDS.get(values.itemsize, torch.int64))
