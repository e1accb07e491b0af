"""Notice changes of a unit's parameters that its home does not have.

[Note: Writes through .data]
A change in place moves the parameter's version counter. `param.data.mul_()` moves none, nor does a NumPy array over
`param.detach()`. So where a parameter in use gives user code its memory (params/param_in_use.py), its values are copied
first, and compared bit for bit where the use ends, or sooner, once nothing holds a view any more. What never asks for
the memory costs nothing; what does, a copy and a comparison. A view that is kept longer is watched as long.
Not seen: writes through a slice that NumPy took under torch.no_grad(), through an address kept from earlier, and
through a view while its unit is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import nn

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of the same size as an element: NaN differs from itself. int64 for elements of 8 bytes or more."""


@final
class ParamWatch:
    """The versions and values of one unit's parameters as a use began. Driver thread.

    `values_of(index)`: the parameter's place in the flat, 1-D.
    """

    def __init__(self, params: Sequence[nn.Parameter], values_of: Callable[[int], torch.Tensor]) -> None:
        self._params = params
        self._values_of = values_of
        self._versions = [0] * len(params)
        self._values: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Compare with the parameters of now from here on."""
        self._versions = [param._version for param in self._params]
        self._values = {index: self._words(index).clone() for index in self._values}

    @property
    def has_values(self) -> bool:
        """Whether user code was given memory of a parameter."""
        return bool(self._values)

    def copy_values(self, index: int) -> None:
        """User code is about to get the memory of the parameter."""
        if index not in self._values:
            self._values[index] = self._words(index).clone()

    def find_change(self) -> int | None:
        """Return the index of a parameter that was changed since `begin`."""
        versions = [param._version for param in self._params]
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            return next(index for index, (found, expected) in enumerate(pairs) if found != expected)
        for index, values in self._values.items():
            if not torch.equal(self._words(index), values):
                return index
        return None

    def end_values(self) -> None:
        """No view that user code was given is left."""
        self._values.clear()

    def _words(self, index: int) -> torch.Tensor:
        values = self._values_of(index)
        return values.view(_WORDS.get(values.itemsize, torch.int64))
