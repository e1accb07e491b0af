"""Run paging where the user's modes and function transforms do not see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from tiered_zero.concurrency.interrupts import protected_in_context


@contextmanager
def _outside_modes() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
        yield


runs_outside_modes = protected_in_context(
    [
        torch._C._len_torch_function_stack,
        torch._C._len_torch_dispatch_stack,
        torch._C._functorch.peek_interpreter_stack,
    ],
    _outside_modes,
)
"""Run a function without the modes that the user has set for operators of this thread: TorchDispatchModes,
TorchFunctionModes (a default device is one) and torch.func's transforms. A selective checkpoint, for one, counts
every operator that it meets in forward and in the recomputation, and copies between tiers are not part of either.
Where no mode is on, that takes three looks, 0.2 us together. Interrupts are deferred: [Note: Interrupted calls]."""
