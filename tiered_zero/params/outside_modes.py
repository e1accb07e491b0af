"""Run paging where the user's modes and function transforms do not see it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from tiered_zero.concurrency.interrupts import INTERRUPTS, mark_protected

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def runs_outside_modes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run `function` without the modes that the user has set for operators of this thread: TorchDispatchModes,
    TorchFunctionModes (a default device is one) and torch.func's transforms. A selective checkpoint, for one, counts
    every operator that it meets in forward and in the recomputation, and copies between tiers are not part of either.
    Where no mode is on, that takes three looks, 0.2 us together. Interrupts are deferred: [Note: Interrupted calls]."""

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            if (
                not torch._C._len_torch_function_stack()
                and not torch._C._len_torch_dispatch_stack()
                and torch._C._functorch.peek_interpreter_stack() is None
            ):
                return function(*args, **kwargs)
            with _disable_current_modes(), torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
                return function(*args, **kwargs)
        except BaseException as error:
            INTERRUPTS.note(error)
            raise
        finally:
            if INTERRUPTS.pending is not None:
                INTERRUPTS.leave()

    return mark_protected(run)
