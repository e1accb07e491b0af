"""Compute gradient norms, alone or while gradients are copied, with the same bits as torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from tiered_zero.native.update import CopyNorm, Dtype, UpdateKernel

_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
_fused_tails: dict[str, bool | None] = {}
"""Maps a level of the kernel to whether ATen's vector_norm was compiled with FMA. None: the kernel's norms differ from
torch's at this level."""


@dataclass(frozen=True, kw_only=True)
class GradCopy:
    """A copy of `source` [n], the gradient of parameter number `index`, to `target` [n], in the dtype of `target`.
    `adds`: whether to add `source` to `target` instead."""

    index: int
    target: torch.Tensor
    source: torch.Tensor
    adds: bool


@final
class GradNorm:
    """Computes the fp32 norm of each gradient, with the same bits as `clip_grad_norm_`. The norm is not finite if an
    element is not finite. Uses the native kernel if a test on this machine finds the same bits, else torch. Any thread
    may use it."""

    def __init__(self, kernel: UpdateKernel | None) -> None:
        self._kernel = None
        if kernel is not None:
            if kernel.level not in _fused_tails:
                _fused_tails[kernel.level] = _find_fused_tail(kernel)
            if (fused_tail := _fused_tails[kernel.level]) is not None:
                self._kernel, self._fused_tail = kernel, fused_tail

    def in_memory(self, grads: Sequence[torch.Tensor]) -> list[float]:
        """Return the norms of gradients [n] in host memory."""
        if self._kernel is None or any(grad.dtype not in _DTYPES for grad in grads):
            return [float(torch.linalg.vector_norm(grad, 2, dtype=torch.float32).item()) for grad in grads]
        return self._kernel.copy_norms(list(map(_scan, grads)), fused_tail=self._fused_tail, threaded=True)

    def on_device(self, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the norms of gradients [n] on an accelerator, as 0-d tensors, without waiting. Used on the driver
        thread or autograd's."""
        # the call of `clip_grad_norm_`, so the order of sums is the same
        return torch._foreach_norm(list(grads), 2, dtype=torch.float32) if grads else []

    def fuses(self, copies: Sequence[GradCopy]) -> bool:
        """Return whether the kernel can make all of `copies`. If not, call neither `copy` nor `copy_threaded`."""
        if self._kernel is None:
            return False
        for copy in copies:
            for values in (copy.target, copy.source):
                if not values.is_cpu or values.dtype not in _DTYPES:
                    return False
        return True

    def copy(self, copies: Sequence[GradCopy]) -> list[float]:
        """Make the copies in order. Return for each copy the norm of its target after the copy. `fuses` must have
        returned True."""
        assert self._kernel is not None, "`fuses` was asked"
        return self._kernel.copy_norms(list(map(_row, copies)), fused_tail=self._fused_tail)

    def copy_threaded(self, copies: Sequence[GradCopy]) -> None:
        """Make the copies on the kernel's threads, and compute no norms. Targets must not overlap. `fuses` must have
        returned True."""
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
