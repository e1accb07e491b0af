"""The most bytes of tensors that code makes at once, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class PeakBytes(TorchDispatchMode):
    """The most bytes of storages that are made inside, at once."""

    def __init__(self, *own: torch.Tensor) -> None:
        """`own`: made before, and not counted where a view of them is made."""
        super().__init__()
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._live: dict[int, int] = {}
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, result)
        self.nbytes = max(self.nbytes, sum(self._live.values()))
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live and storage._cdata not in self._own:
            self._live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, storage._cdata)
