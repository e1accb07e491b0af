"""The L2 norm of one gradient, with torch's bits, in the pass that brings it to its home where there is a kernel; and
the sum of squares of those of a rank's shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch

from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.layout.flat import FlatEntry
from tiered_zero.native.update import CopyNormArgs, Dtype, UpdateKernel

SQUARES_CHUNK_NUMEL = 1 << 18
"""Elements whose squares are summed at once in fp64: 2 MiB beside the gradients, and one order of sums anywhere."""

NONE_BAD = -1
_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
_fused_tails: dict[str, bool | None] = {}
"""Level of the kernel -> how ATen's vector_norm was compiled, or None where the kernel does not give its bits."""


@final
class GradNorm:
    """The norm that `clip_grad_norm_` takes of one parameter's gradient, 0-d fp32. Not finite if an element is not.

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

    def of(self, grad: torch.Tensor) -> torch.Tensor:
        """`grad`: [n] contiguous."""
        if self._kernel is None or not grad.is_cpu or grad.dtype not in _DTYPES:
            norm: torch.Tensor = torch.linalg.vector_norm(grad, 2, dtype=torch.float32)
            return norm
        return self._run(self._kernel, _copy_norm_args(grad, None, False))

    def fuses_copy(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether `copy_with_norm` takes these."""
        return self._kernel is not None and all(x.is_cpu and x.dtype in _DTYPES for x in (target, source))

    def copy_with_norm(self, target: torch.Tensor, source: torch.Tensor, add: bool) -> torch.Tensor:
        """`source` [n] -> `target` [n]: copied, or added in the target's dtype; the norm of what it then holds."""
        assert self._kernel is not None and target.numel() == source.numel(), "as `fuses_copy` says"
        return self._run(self._kernel, _copy_norm_args(source, target, add))

    def _run(self, kernel: UpdateKernel, args: CopyNormArgs) -> torch.Tensor:
        return torch.tensor(kernel.copy_norm(args, fused_tail=self._fused_tail), dtype=torch.float32, device="cpu")


def _copy_norm_args(source: torch.Tensor, target: torch.Tensor | None, add: bool) -> CopyNormArgs:
    target_type = _DTYPES[torch.float32 if target is None else target.dtype]
    address = None if target is None else target.data_ptr()
    return CopyNormArgs(source.data_ptr(), address, source.numel(), _DTYPES[source.dtype], target_type, add)


def _find_fused_tail(kernel: UpdateKernel) -> bool | None:
    generator = torch.Generator().manual_seed(0)
    numels = [numel for numel in (*range(1, 40), 1001, 4099) for _ in range(25)]
    grads = [torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu") for numel in numels]
    expected = [torch.linalg.vector_norm(grad).item() for grad in grads]
    for fused_tail in (True, False):
        found = (kernel.copy_norm(_copy_norm_args(grad, None, False), fused_tail=fused_tail) for grad in grads)
        if all(norm == want for norm, want in zip(found, expected, strict=True)):
            return fused_tail
    return None


def sum_squares(units: Iterable[UnitGradients], rank: int) -> tuple[float, int]:
    """Return the sum of squares of the averaged gradients in this rank's shards, in fp64, and the index of the first
    parameter with one that is not finite, else NONE_BAD."""
    total, bad = 0.0, NONE_BAD
    for each in units:
        for entry in each.unit.entries:
            if entry.param.index in each.present:
                squares = _squares_of_shard(each, entry, rank)
                total += squares
                if not squares < float("inf"):
                    bad = entry.param.index if bad == NONE_BAD else min(bad, entry.param.index)
    return total, bad


def _squares_of_shard(gradients: UnitGradients, entry: FlatEntry, rank: int) -> float:
    shard = gradients.unit.shard(rank)
    total, stop = 0.0, min(entry.stop, shard.stop)
    for start in range(max(entry.start, shard.start), stop, SQUARES_CHUNK_NUMEL):
        last = min(start + SQUARES_CHUNK_NUMEL, stop)
        part = gradients.flat[start - gradients.start : last - gradients.start].double()
        total += (part * part).sum().item()
    return total
