"""The L2 norm of one gradient, with torch's bits: on the accelerator where it was computed there, else in the pass that
brings it to its home where there is a kernel; and the sum of squares of those of a rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.layout.flat import Unit
from tiered_zero.native.update import CopyNorm, Dtype, UpdateKernel

SQUARES_CHUNK_NUMEL = 1 << 18
"""Elements whose squares are summed at once in fp64: 2 MiB beside the gradients, and one order of sums anywhere."""

NONE_BAD = -1
Norm = float | torch.Tensor
"""Of fp32: a number where it was taken in host memory, 0-d where the gradient rests."""

_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
_fused_tails: dict[str, bool | None] = {}
"""Level of the kernel -> how ATen's vector_norm was compiled, or None where the kernel does not give its bits."""


@dataclass(frozen=True, kw_only=True)
class GradCopy:
    """A gradient `source` [n], on the device, of the parameter `index`, that goes to `target` [n] in host memory, or is
    added there, in the target's dtype."""

    index: int
    target: torch.Tensor
    source: torch.Tensor
    adds: bool


@final
class GradNorm:
    """The norm that `clip_grad_norm_` takes of one parameter's gradient, in fp32. Not finite if an element is not.

    torch converts 16-bit gradients in a pass of their own and adds in another; the kernel gives the same bits in one.
    Whether it does is tried once; where not (ARM, another compiler), torch is taken. Any thread.
    """

    def __init__(self, kernel: UpdateKernel | None) -> None:
        self._kernel = None
        if kernel is not None:
            if kernel.level not in _fused_tails:
                _fused_tails[kernel.level] = _find_fused_tail(kernel)
            if (fused_tail := _fused_tails[kernel.level]) is not None:
                self._kernel, self._fused_tail = kernel, fused_tail

    def of(self, grad: torch.Tensor) -> Norm:
        """`grad`: [n] contiguous."""
        return self.in_memory([grad])[0] if grad.is_cpu else self.on_device([grad])[0]

    def in_memory(self, grads: Sequence[torch.Tensor]) -> list[float]:
        """Take the norms of gradients [n] in host memory: one a thread, where the kernel takes them."""
        if self._kernel is None or any(grad.dtype not in _DTYPES for grad in grads):
            return [float(torch.linalg.vector_norm(grad, 2, dtype=torch.float32).item()) for grad in grads]
        return self._kernel.copy_norms(list(map(_scan, grads)), fused_tail=self._fused_tail, threaded=True)

    def on_device(self, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Launch the norms of gradients [n] on an accelerator, 0-d each, by the call of `clip_grad_norm_` there: one
        order of sums wherever the gradients go from here. Driver or autograd's thread."""
        return torch._foreach_norm(list(grads), 2, dtype=torch.float32) if grads else []

    def fuses(self, copies: Sequence[GradCopy]) -> bool:
        """Whether `copy` takes these."""
        if self._kernel is None:
            return False
        for copy in copies:
            for values in (copy.target, copy.source):
                if not values.is_cpu or values.dtype not in _DTYPES:
                    return False
        return True

    def copy(self, copies: Sequence[GradCopy]) -> list[float]:
        """Make the copies, in their order; return the norm of what each target then holds."""
        assert self._kernel is not None, "as `fuses` says"
        return self._kernel.copy_norms(list(map(_row, copies)), fused_tail=self._fused_tail)

    def copy_threaded(self, copies: Sequence[GradCopy]) -> None:
        """Make the copies on the kernel's threads, without norms. No two have the same target."""
        assert self._kernel is not None, "as `fuses` says"
        self._kernel.copy(list(map(_row, copies)))


def _row(copy: GradCopy) -> CopyNorm:
    target, source = copy.target, copy.source
    assert target.numel() == source.numel(), "a gradient has one place"
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
    """Sum the squares of elements `span` of a unit's gradients, [n] averages, in fp64: 0-d each, by parameter. Launches
    where `values` lie."""
    squares: dict[int, list[torch.Tensor]] = {entry.param.index: [] for entry in unit.entries}
    for entry in unit.entries:
        stop = min(entry.stop, span.stop)
        for start in range(max(entry.start, span.start), stop, SQUARES_CHUNK_NUMEL):
            last = min(start + SQUARES_CHUNK_NUMEL, stop)
            part = values[start - span.start : last - span.start].double()
            squares[entry.param.index].append((part * part).sum())
    return squares


def sum_squares(units: Iterable[UnitGradients], spans: Mapping[int, Sequence[range]]) -> tuple[float, int]:
    """Return the sum of squares of the averaged gradients in this rank's shards, in fp64, and the index of the first
    parameter with one that is not finite, else NONE_BAD. `spans`: of a unit, the elements that this rank reduces, as
    its buckets cut them. What was not measured as it arrived is read at its home. One wait of the host for the
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
    """Return the values of 0-d tensors, in their order; those of the device come together."""
    on_device = [number for number in numbers if not number.is_cpu]
    came = iter(torch.stack(on_device).tolist() if on_device else ())
    return [float(number) if number.is_cpu else next(came) for number in numbers]
