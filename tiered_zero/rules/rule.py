"""Define the interface of update rules: which state a parameter has, and how a run (a slice of masters) is stepped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL
from tiered_zero.native.update import UpdateKernel
from tiered_zero.sizes import align_up

_CPU_CHUNK_NUMEL = 1 << 17
_DEVICE_CHUNK_NUMEL = 1 << 22
"""Elements that a step processes at once (first on the CPU, here on a device), which limits temporary memory."""


@dataclass(frozen=True, kw_only=True)
class StateField:
    """Describes one array of optimizer state for a run. `block_numel`: in an elementwise rule, the number of
    neighbouring elements of the run that one element of the array describes. `stride`: the stride of an array whose
    memory is in another order; None: row-major.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_numel: int = 1
    stride: tuple[int, ...] | None = None

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(kw_only=True)
class Run:
    """Adjacent master weights that one call updates in the same way, with everything that the rule needs.

    For an elementwise rule the arrays are [n] slices, which may be cut anywhere and may span several parameters. For
    any other rule they are one whole parameter in its own shape. `master`: fp32, updated in place; or the int16
    remainders of `out`, which then holds the old parameter. `grad`: fp32, bf16 or fp16, in the same shape, averaged
    over ranks; may be overwritten. `state`: name of a `StateField` -> its array, updated in place; all zero before the
    first step (see `UpdateRule.init_state`). `scalars`: 0-d state such as step counts, replaced by the rule; empty
    before the first step. `hyper`: the values of the param group, without "params". `out`: [same shape] the 16-bit
    parameter to write, or None. `grad_scale`: factor for the gradient, which unscales and clips at once; 1.0 leaves
    its bits unchanged.
    """

    master: torch.Tensor
    grad: torch.Tensor
    state: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    hyper: Mapping[str, Any]
    out: torch.Tensor | None = None
    grad_scale: float = 1.0

    def part(self, start: int, stop: int) -> Run:
        """Return a run of the elements [start, stop) of this one, which belongs to an elementwise rule."""
        part = slice(start, stop)
        state = {name: array[part] for name, array in self.state.items()}
        out = None if self.out is None else self.out[part]
        return replace(self, master=self.master[part], grad=self.grad[part], state=state, out=out)


class UpdateRule(ABC):
    """Makes optimizer steps on runs. Knows nothing of tiers, units or files. Called on one thread at a time."""

    name: str
    elementwise: bool
    """True if element i of an output depends only on element i of the inputs, so that runs may be cut anywhere."""

    unsigned_field: str | None = None
    """The name of a state array that is never negative, so its sign bits may store a mark of the masters
    ([Note: bf16 and remainder]); None without one."""

    keeps_group_state: bool = False
    """Whether a step changes values of its param group, as classes do that count their steps there."""

    temporaries: int = 4
    """The number of temporary fp32 arrays, as long as the runs, that a step on an accelerator needs at once, besides
    copies of state and gradients. No torch class needs more than 4."""

    kernel: UpdateKernel | None = None
    """The native kernel, which also computes gradient norms; None if torch's operations do both."""

    @abstractmethod
    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        """Return descriptions of the state arrays (not the scalars) of a run of `shape`. Raises ModelError if the
        rule's class cannot step one parameter at a time."""

    def init_state(self, state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]) -> None:
        """Set the initial values in the state arrays of a run, which are zero. Called before the run's first step."""
        return

    def first_state(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that torch's optimizer has for a parameter of `shape` before its first step; empty for most
        classes."""
        return {}

    def export_state(self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state in the format of torch's optimizer: fp32 arrays, which may share the memory of `state`, and
        scalars. Empty before the first step."""
        return {**state, **scalars}

    def check_state(self, values: Mapping[str, Any], shape: tuple[int, ...], hyper: Mapping[str, Any]) -> None:
        """Raise ModelError unless a parameter of `shape` can be stepped from `values`, its state in torch's format."""
        return

    def import_state(
        self, values: Mapping[str, Any], state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Invert `export_state`: copy the arrays in `values`, state in torch's format, to `state`, rounded to nearest
        if `state` has fewer bits, and return the scalars."""
        for name, array in state.items():
            array.copy_(values[name])
        return {name: value for name, value in values.items() if name not in state}

    def load_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the scalars of a checkpoint to this rule's `Run.scalars`; they may come from another kind of rule
        with the same results. Raises TypeError, ValueError or KeyError if they are invalid."""
        return dict(scalars)

    def announce(self) -> None:
        """Log which code computes the update, if that depends on the machine or the config."""
        return

    def close(self) -> None:
        """End the threads that the rule uses."""
        return

    def advance_groups(self, groups: Sequence[dict[str, Any]], frozen: Sequence[Mapping[str, Any]]) -> None:
        """Change the live param `groups` as a step changes them. `frozen`: copies of the groups from which the step
        reads its values. Called on the driver thread, before the runs of a step."""
        return

    @abstractmethod
    def update(self, runs: Sequence[Run]) -> None:
        """Make one step on every run, and write its `out` if it has one. Invalid arguments raise before anything is
        written."""


def batches(
    runs: Sequence[Run], cut: Callable[[Run, int, int], Run] = Run.part, cpu_numel: int = _CPU_CHUNK_NUMEL
) -> Iterator[list[Run]]:
    """Yield `runs`, which are stepped with the same numbers, in batches. `cut(run, start, stop)` cuts a run that is too
    long. On a device a batch has up to _DEVICE_CHUNK_NUMEL elements of many runs; on the CPU it has one run of at most
    `cpu_numel` elements, which fits into the cache."""
    on_cpu = runs[0].master.is_cpu
    most_numel = cpu_numel if on_cpu else _DEVICE_CHUNK_NUMEL
    batch: list[Run] = []
    room_numel = most_numel
    for run in runs:
        numel, start = run.master.numel(), 0
        while start < numel:
            stop = min(start + room_numel, numel)
            batch.append(cut(run, start, stop) if stop - start < numel else run)
            room_numel -= align_up(stop - start, QUANTIZED_BLOCK_NUMEL)
            start = stop
            if on_cpu or not room_numel:
                yield batch
                batch, room_numel = [], most_numel
    if batch:
        yield batch


@contextmanager
def packed(runs: Sequence[Run], block_numel: int = 1, per_block: Collection[str] = ()) -> Iterator[Run]:
    """Yield one run that holds copies of all `runs` end to end, and copy its results back after the block; a single run
    is yielded as it is. Each run begins at a multiple of `block_numel`, with zeros in between. `per_block`: names of
    the state arrays that have one element per block. One launch copies an array of all runs."""
    first = runs[0]
    if len(runs) == 1:
        yield first
        return
    masters = _join([run.master for run in runs], block_numel)
    grads = _join([run.grad for run in runs], block_numel)
    outs = None if first.out is None else _join([run.out for run in runs if run.out is not None], block_numel)
    state = {
        name: _join([run.state[name] for run in runs], 1 if name in per_block else block_numel) for name in first.state
    }
    own = {name: joined for name, (joined, _) in state.items()}
    yield replace(first, master=masters[0], grad=grads[0], state=own, out=None if outs is None else outs[0])
    torch._foreach_copy_([run.master for run in runs], masters[1])
    for name, (_, parts) in state.items():
        torch._foreach_copy_([run.state[name] for run in runs], parts)
    if outs is not None:
        torch._foreach_copy_([run.out for run in runs if run.out is not None], outs[1])


def _join(arrays: Sequence[torch.Tensor], block_numel: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy `arrays` into one array, each from a multiple of `block_numel` on. Return that array, and the part of it for
    each of `arrays`."""
    numels = [array.numel() for array in arrays]
    spans = [align_up(numel, block_numel) for numel in numels]
    make = torch.empty if spans == numels else torch.zeros
    joined = make(sum(spans), dtype=arrays[0].dtype, device=arrays[0].device)
    pairs = zip(joined.split_with_sizes(spans), numels, strict=True)
    parts = [part if part.numel() == numel else part[:numel] for part, numel in pairs]
    torch._foreach_copy_(parts, list(arrays))
    return joined, parts
