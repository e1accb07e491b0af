"""Run paging code outside the user's torch modes and function transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@contextmanager
def _outside_modes() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
        yield


def runs_outside_modes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return `function` as one that runs without the modes that the user has set on this thread: TorchDispatchModes,
    TorchFunctionModes (such as a default device) and torch.func's transforms. A selective checkpoint, for example,
    counts every operator in forward and in the recomputation, and must not count copies between tiers. If no mode is
    on, the check takes 0.2 us."""

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not (_len_torch_function_stack() or _len_torch_dispatch_stack() or peek_interpreter_stack()):
            return function(*args, **kwargs)
        with _outside_modes():
            return function(*args, **kwargs)

    return run
