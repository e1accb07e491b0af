"""Define the interface of update rules: the state of a parameter, and the step of a slice of master weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from tiered_zero.errors import ModelError
from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL
from tiered_zero.native.update import UpdateKernel
from tiered_zero.sizes import align_up

_CPU_CHUNK_NUMEL = 1 << 17
_DEVICE_CHUNK_NUMEL = 1 << 22
"""The most elements in one batch of `batches` on an accelerator. On the CPU the default is _CPU_CHUNK_NUMEL. Both bound
temporary memory."""


@dataclass(frozen=True, kw_only=True)
class StateField:
    """Describes one array of a slice's optimizer state."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_numel: int = 1  # elements of the slice for each element of the array; more than 1 for scales of 8 bits
    stride: tuple[int, ...] | None = None  # in memory; None: row-major

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(kw_only=True)
class Slice:
    """One slice of master weights with its gradient and state: the input of one update.

    For an elementwise rule the arrays are [n], and the slice may start and end anywhere and span several parameters.
    For any other rule the slice is one whole parameter in its own shape.
    """

    master: torch.Tensor  # fp32, updated in place; or int16 remainders, with the old parameter in `out`
    grad: torch.Tensor  # fp32, bf16 or fp16, averaged over ranks; may be overwritten
    state: dict[str, torch.Tensor]  # name of a `StateField` -> its array, updated in place
    scalars: dict[str, Any]  # other state, such as step counts; replaced by the rule; empty before the first step
    hyper: Mapping[str, Any]  # the values of the param group, without "params"
    out: torch.Tensor | None = None  # the 16-bit parameter to write
    grad_scale: float = 1.0  # unscales and clips the gradient; 1.0 leaves its bits unchanged

    def cut(self, start: int, stop: int) -> Slice:
        """Return the elements [start, stop) as a slice of views. Only for elementwise rules."""
        part = slice(start, stop)
        state = {name: array[part] for name, array in self.state.items()}
        out = None if self.out is None else self.out[part]
        return replace(self, master=self.master[part], grad=self.grad[part], state=state, out=out)


class UpdateRule(ABC):
    """Makes optimizer steps on slices of master weights. Called on one thread at a time."""

    name: str
    elementwise: bool
    """Whether element i of each output depends only on element i of the inputs. Slices may then be cut anywhere.
    With 8-bit state, element i depends on its whole block, and slices may be cut only between blocks."""

    unsigned_field: str | None = None
    """The name of a state array without negative values; None: the rule has none. The sign bits of this array may store
    one bit of each master ([Note: bf16 and remainder])."""

    keeps_group_state: bool = False
    """Whether a step changes values of its param group, such as a step count."""

    temporaries: int = 4
    """The largest number of temporary fp32 arrays in a step on an accelerator. Each array is as long as all stepped
    slices together. Copies of state and gradients are not counted. No torch class needs more than 4."""

    kernel: UpdateKernel | None = None
    """The native kernel. It computes updates on the CPU, and gradient norms. None: torch's operations compute the
    updates."""

    @abstractmethod
    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        """Describe the state arrays of a slice of `shape`. Raises ModelError if the class cannot step one parameter at
        a time."""

    def init_state(self, state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]) -> None:
        """Set a slice's state arrays, which are zero before, to their initial values. Called before the first step."""
        return

    def first_state(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that torch's optimizer has for a parameter of `shape` before its first step."""
        return {}

    def export_state(self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Convert state to torch's format: name -> fp32 array or scalar; {} before the first step. Arrays may share
        memory with `state`."""
        return {**state, **scalars}

    def check_state(self, values: Mapping[str, Any], shape: tuple[int, ...], hyper: Mapping[str, Any]) -> None:
        """Raise ModelError if a parameter of `shape` cannot be stepped from `values`, its state in torch's format."""
        return

    def import_state(
        self, values: Mapping[str, Any], state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Copy `values`, state in torch's format, to the arrays `state`, rounded to nearest. Return the scalars."""
        for name, array in state.items():
            array.copy_(values[name])
        return {name: value for name, value in values.items() if name not in state}

    def load_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint's scalars to `Slice.scalars`. Another rule for the same optimizer may have written them.
        Raises TypeError, ValueError or KeyError if they are invalid."""
        return dict(scalars)

    def announce(self) -> None:
        """Log whether the native kernel or torch computes the update. TorchRule logs nothing."""
        return

    def close(self) -> None:
        """End the kernel's threads."""
        if self.kernel is not None:
            self.kernel.close()

    def refuse_unplanned(self, needed: Iterable[str], planned: Collection[str]) -> None:
        """Raise ModelError if a state array in `needed` is missing from `planned`."""
        if missing := sorted({*needed} - {*planned}):
            raise ModelError(
                f"{self.name} was planned with the state arrays {sorted(planned)}; it needs {missing} besides. Give "
                "the optimizer the option that needs them (momentum, amsgrad ...) before tiered_zero.initialize()."
            )

    def advance_groups(self, groups: Sequence[dict[str, Any]], frozen: Sequence[Mapping[str, Any]]) -> None:
        """Make the changes of one step, such as new step counts, in the user's param `groups`. `frozen`: copies of the
        groups from before these changes. The step reads these copies. Called on the driver thread, before `update`."""
        return

    @abstractmethod
    def update(self, slices: Sequence[Slice]) -> None:
        """Make one optimizer step on every slice: change `master`, `state` and `out` in place, and replace
        `scalars`."""


def batches(
    slices: Sequence[Slice], cut: Callable[[Slice, int, int], Slice] = Slice.cut, cpu_numel: int = _CPU_CHUNK_NUMEL
) -> Iterator[list[Slice]]:
    """Yield `slices`, all with the same hyperparameters, in batches of limited size. On the CPU a batch is one slice of
    at most `cpu_numel` elements. `cut(part, start, stop)` returns a part of a slice that is too long."""
    on_cpu = slices[0].master.is_cpu
    most_numel = cpu_numel if on_cpu else _DEVICE_CHUNK_NUMEL  # on the CPU one slice, to fit into the cache
    batch: list[Slice] = []
    room_numel = most_numel
    for part in slices:
        numel, start = part.master.numel(), 0
        while start < numel:
            stop = min(start + room_numel, numel)
            batch.append(cut(part, start, stop) if stop - start < numel else part)
            room_numel -= align_up(stop - start, QUANTIZED_BLOCK_NUMEL)
            start = stop
            if on_cpu or not room_numel:
                yield batch
                batch, room_numel = [], most_numel
    if batch:
        yield batch


@contextmanager
def packed(slices: Sequence[Slice], block_numel: int = 1, per_block: Collection[str] = ()) -> Iterator[Slice]:
    """A context manager that joins copies of `slices` to one slice, and copies its results back after the block. A
    single slice is yielded without a copy. In the joined slice each slice begins at a multiple of `block_numel`, and
    gaps are zero. `per_block`: the state arrays with one element per block."""
    first = slices[0]
    if len(slices) == 1:
        yield first
        return
    masters = _join([part.master for part in slices], block_numel)
    grads = _join([part.grad for part in slices], block_numel)
    outs = None if first.out is None else _join([part.out for part in slices if part.out is not None], block_numel)
    state = {
        name: _join([part.state[name] for part in slices], 1 if name in per_block else block_numel)
        for name in first.state
    }
    own = {name: joined for name, (joined, _) in state.items()}
    yield replace(first, master=masters[0], grad=grads[0], state=own, out=None if outs is None else outs[0])
    torch._foreach_copy_([part.master for part in slices], masters[1])
    for name, (_, parts) in state.items():
        torch._foreach_copy_([part.state[name] for part in slices], parts)
    if outs is not None:
        torch._foreach_copy_([part.out for part in slices if part.out is not None], outs[1])


def _join(arrays: Sequence[torch.Tensor], block_numel: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy `arrays` one after another into a new array, where each begins at a multiple of `block_numel`. Return the
    new array, and a list with the view of each copy."""
    numels = [array.numel() for array in arrays]
    spans = [align_up(numel, block_numel) for numel in numels]
    make = torch.empty if spans == numels else torch.zeros
    joined = make(sum(spans), dtype=arrays[0].dtype, device=arrays[0].device)
    pairs = zip(joined.split_with_sizes(spans), numels, strict=True)
    parts = [part if part.numel() == numel else part[:numel] for part, numel in pairs]
    torch._foreach_copy_(parts, list(arrays))
    return joined, parts
