"""Compute the L2 norm of a gradient, bit for bit as torch does, and the sum of squares of a rank's shards. A norm is
taken on the accelerator if the gradient was computed there; else, if there is a kernel, in the pass that copies the
gradient to its home."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.layout.flat import Unit
from tiered_zero.native.update import CopyNorm, Dtype, UpdateKernel

SQUARES_CHUNK_NUMEL = 1 << 18
"""Elements whose squares are summed at once in fp64: 2 MiB of extra memory, and the same order of sums everywhere."""

NONE_BAD = -1
Norm = float | torch.Tensor
"""An fp32 norm: a number if it was taken in host memory, else a 0-d tensor on the gradient's device."""

_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
_fused_tails: dict[str, bool | None] = {}
"""Level of the kernel -> how ATen's vector_norm was compiled, or None if the kernel does not reproduce its bits."""


@dataclass(frozen=True, kw_only=True)
class GradCopy:
    """A gradient `source` [n], of the parameter `index`, to be copied or added to `target` [n] in host memory, in the
    target's dtype."""

    index: int
    target: torch.Tensor
    source: torch.Tensor
    adds: bool


@final
class GradNorm:
    """Takes the fp32 norm that `clip_grad_norm_` takes of one gradient; not finite if an element is not. Any thread.

    torch converts 16-bit gradients in one pass and adds in another; the kernel gives the same bits in one pass. Whether
    it does on this machine is tried once; if not (ARM, another compiler), torch is used.
    """

    def __init__(self, kernel: UpdateKernel | None) -> None:
        self._kernel = None
        if kernel is not None:
            if kernel.level not in _fused_tails:
                _fused_tails[kernel.level] = _find_fused_tail(kernel)
            if (fused_tail := _fused_tails[kernel.level]) is not None:
                self._kernel, self._fused_tail = kernel, fused_tail

    def of(self, grad: torch.Tensor) -> Norm:
        """Return the norm of `grad`, [n] contiguous."""
        return self.in_memory([grad])[0] if grad.is_cpu else self.on_device([grad])[0]

    def in_memory(self, grads: Sequence[torch.Tensor]) -> list[float]:
        """Return the norms of gradients [n] in host memory. The kernel, if it can take them, uses one thread for
        each."""
        if self._kernel is None or any(grad.dtype not in _DTYPES for grad in grads):
            return [float(torch.linalg.vector_norm(grad, 2, dtype=torch.float32).item()) for grad in grads]
        return self._kernel.copy_norms(list(map(_scan, grads)), fused_tail=self._fused_tail, threaded=True)

    def on_device(self, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Launch the norms of gradients [n] on an accelerator, 0-d each, with the call that `clip_grad_norm_` makes:
        the order of sums is the same wherever the gradients rest. Driver or autograd's thread."""
        return torch._foreach_norm(list(grads), 2, dtype=torch.float32) if grads else []

    def fuses(self, copies: Sequence[GradCopy]) -> bool:
        """Return whether `copy` can take these copies."""
        if self._kernel is None:
            return False
        for copy in copies:
            for values in (copy.target, copy.source):
                if not values.is_cpu or values.dtype not in _DTYPES:
                    return False
        return True

    def copy(self, copies: Sequence[GradCopy]) -> list[float]:
        """Make the copies in order, and return the norm of what each target then holds."""
        assert self._kernel is not None, "`fuses` was asked"
        return self._kernel.copy_norms(list(map(_row, copies)), fused_tail=self._fused_tail)

    def copy_threaded(self, copies: Sequence[GradCopy]) -> None:
        """Make the copies on the kernel's threads, without norms. No two have the same target."""
        assert self._kernel is not None, "`fuses` was asked"
        self._kernel.copy(list(map(_row, copies)))


def _row(copy: GradCopy) -> CopyNorm:
    target, source = copy.target, copy.source
    assert target.numel() == source.numel(), "source and target have the same elements"
    return source.data_ptr(), target.data_ptr(), source.numel(), _DTYPES[source.dtype], _DTYPES[target.dtype], copy.adds


def _scan(grad: torch.Tensor) -> CopyNorm:
    return grad.data_ptr(), None, grad.numel(), _DTYPES[grad.dtype], Dtype.FLOAT32, False


def _find_fused_tail(kernel: UpdateKernel) -> bool | None:
    generator = torch.Generator().manual_seed(0)
    numels = [numel for numel in (*range(1, 40), 1001, 4099) for _ in range(25)]
    grads = [torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu") for numel in numels]
    expected = [torch.linalg.vector_norm(grad).item() for grad in grads]
    for fused_tail in (True, False):
        if kernel.copy_norms(list(map(_scan, grads)), fused_tail=fused_tail) == expected:
            return fused_tail
    return None


def span_squares(values: torch.Tensor, span: range, unit: Unit) -> dict[int, list[torch.Tensor]]:
    """Sum the squares of averages in fp64, by parameter: lists of 0-d tensors. `values`: [n], elements `span` of the
    unit's gradients. Launches on their device."""
    squares: dict[int, list[torch.Tensor]] = {entry.param.index: [] for entry in unit.entries}
    for entry in unit.entries:
        stop = min(entry.stop, span.stop)
        for start in range(max(entry.start, span.start), stop, SQUARES_CHUNK_NUMEL):
            last = min(start + SQUARES_CHUNK_NUMEL, stop)
            part = values[start - span.start : last - span.start].double()
            squares[entry.param.index].append((part * part).sum())
    return squares


def sum_squares(units: Iterable[UnitGradients], spans: Mapping[int, Sequence[range]]) -> tuple[float, int]:
    """Return the fp64 sum of squares of the averaged gradients in this rank's shards, and the index of the first
    parameter whose gradient is not finite, or NONE_BAD. `spans`: unit -> the elements that this rank reduces, as its
    buckets cut them. Gradients that were not measured on arrival are read at their home. The host waits once for the
    device."""
    found: list[tuple[int, list[torch.Tensor]]] = []
    for each in units:
        if not each.present:
            continue
        squares = each.squares
        if not squares:
            with each.opened() as flat:
                for span in spans.get(each.unit.index, ()):
                    values = flat[span.start - each.start : span.stop - each.start]
                    for index, more in span_squares(values, span, each.unit).items():
                        squares.setdefault(index, []).extend(more)
        order = [entry.param.index for entry in each.unit.entries if entry.param.index in each.present]
        found += [(index, squares[index]) for index in order if index in squares]
    numbers = iter(_on_host([square for _, squares in found for square in squares]))
    total, bad = 0.0, NONE_BAD
    for index, parts in found:
        total += (of_param := sum(next(numbers) for _ in parts))
        if not of_param < float("inf"):
            bad = index if bad == NONE_BAD else min(bad, index)
    return total, bad


def _on_host(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of 0-d tensors in their order. Those on the device are copied together."""
    on_device = [number for number in numbers if not number.is_cpu]
    came = iter(torch.stack(on_device).tolist() if on_device else ())
    return [float(number) if number.is_cpu else next(came) for number in numbers]
