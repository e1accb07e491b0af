"""Detection of the fp32 square root that torch takes on this processor, by trying every value.

[Note: bits of torch] On fp32 gradients the kernel gives, element by element, the bits of the torch optimizer's
for-loop and foreach forms: the same operations in the same order, with fused multiply-add exactly where ATen's AVX2
and AVX-512 code has it. All of them are IEEE operations but one: where torch was built with MKL, its fp32 square root
is MKL's, which differs from the exact root by one unit in the last place, in 0 to 20% of all values, depending on the
processor. So for fp32 gradients the kernel takes the first of three that has torch's bits: the exact root; Newton's
from the processor's estimate, unfused, which is what MKL's generic code gives (on AMD); or the same MKL function
(VMSSQRT_, exported by libtorch_cpu), six times as long as the exact one and half of the update's time. With 16-bit
gradients the kernel takes the exact root; torch's bits are not promised there, only equality between placements.

Two questions are left to the machine, and each is answered before a rule uses the kernel for fp32 gradients. Does the
candidate root equal torch's? All mantissas of two binades are compared, since an exponent that is larger by two only
doubles a root, and the ends and samples of every binade, where code for special values would begin. Are multiplications
and additions fused where the kernel fuses them? NativeRule compares one step of each variant of its rule. Where either
answer is no (ATen without FMA, another MKL), fp32 gradients take torch's own code, and the report says so.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from tiered_zero.native.update import Flag, MklRoot, UpdateKernel

ROOTS = Flag(0), Flag.NEWTON_ROOT, Flag.TORCH_ROOT
"""Square roots of the kernel, the quickest first."""

_ONE = 0x3F800000
_MANTISSAS = 1 << 23
_CHUNK_NUMEL = 1 << 18
_BINADE_SAMPLES = 1 << 9
_END_SAMPLES = 1 << 6
_LAST = 1 << 13
_SPECIAL = (0.0, -0.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4028235e38)
_found: dict[tuple[Path, str, MklRoot | None], Flag | None] = {}


def find_torch_root() -> MklRoot | None:
    """The MKL function that torch's fp32 square root is, where this torch has it."""
    torch.ones(1, dtype=torch.float32, device="cpu").sqrt()  # MKL's first call must not be raced (pytorch#188792)
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        functions = library.VMSSQRT_, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None
    square_root, set_threads = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return MklRoot(square_root, set_threads)


def choose_root(kernel: UpdateKernel) -> Flag | None:
    """Find the quickest of the kernel's square roots (ROOTS) that has torch's bits; None if none has. Compared once per
    process and kernel level, in about 30 ms."""
    key = kernel.path, kernel.level, kernel.root
    if key not in _found:
        candidates = (flag for flag in ROOTS if kernel.root or flag is not Flag.TORCH_ROOT)
        _found[key] = next((flag for flag in candidates if _has_torch_bits(kernel, flag)), None)
    return _found[key]


def _has_torch_bits(kernel: UpdateKernel, flag: Flag) -> bool:
    for values in _root_arguments():
        ours = numpy.empty_like(values)
        kernel.square_roots(values.ctypes.data, ours.ctypes.data, values.size, flag)
        theirs = torch.from_numpy(values).sqrt().numpy()
        if not numpy.array_equal(ours, theirs) and not numpy.array_equal(ours, theirs, equal_nan=True):
            return False
    return True


def _root_arguments() -> Iterator[numpy.ndarray[Any, Any]]:
    """Yield special values, samples and ends of every binade, the last values, and all from 1 to 4. In numpy, here."""
    yield numpy.array(_SPECIAL * 2, numpy.float32)
    step = _MANTISSAS // _BINADE_SAMPLES
    yield numpy.arange(step // 2 + 1, 255 * _MANTISSAS, step, dtype=numpy.int32).view(numpy.float32)
    ends = numpy.arange(1, 255)[:, None] * _MANTISSAS + numpy.arange(-_END_SAMPLES, _END_SAMPLES)
    yield ends.ravel().astype(numpy.int32).view(numpy.float32)
    yield numpy.arange(255 * _MANTISSAS - _LAST, 255 * _MANTISSAS, dtype=numpy.int32).view(numpy.float32)
    for start in range(_ONE, _ONE + 2 * _MANTISSAS, _CHUNK_NUMEL):
        yield numpy.arange(start, start + _CHUNK_NUMEL, dtype=numpy.int32).view(numpy.float32)
