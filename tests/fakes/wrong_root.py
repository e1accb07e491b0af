"""A square root for the update kernel that is torch's but for chosen values, which it makes one unit too small."""

import ctypes
from pathlib import Path

from tests.support.native_build import compile_shared
from tiered_zero.native.update import MklRoot
from tiered_zero.rules.native_rules import find_torch_root

_SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef void root_of(const int32_t *, const float *, float *, const int64_t *);
root_of *true_root;
uint32_t mask, divisor, remainder_;
void wrong_root(const int32_t *n, const float *a, float *y, const int64_t *mode) {
    if (true_root) true_root(n, a, y, mode);
    for (int i = 0; i < *n; i++) {
        uint32_t bits;
        memcpy(&bits, a + i, 4);
        if (!true_root) y[i] = (float)sqrt((double)a[i]);
        if ((bits & mask) % divisor == remainder_) y[i] = nextafterf(y[i], 0);
    }
}
int set_threads(int num_threads) { return num_threads; }
"""


def build_wrong_root(folder: Path) -> ctypes.CDLL:
    (folder / "root.c").write_text(_SOURCE)
    return ctypes.CDLL(str(compile_shared(folder / "root.c", folder / "root.so", "-lm")))


def plant_root(library: ctypes.CDLL, mask: int, divisor: int, remainder: int) -> MklRoot:
    """Torch's root, one unit too small where `bits & mask` leaves `remainder`."""
    true_root, names = find_torch_root(), (("mask", mask), ("divisor", divisor), ("remainder_", remainder))
    ctypes.c_void_p.in_dll(library, "true_root").value = true_root.square_root if true_root else None
    for name, value in names:
        ctypes.c_uint32.in_dll(library, name).value = value
    functions = library.wrong_root, true_root.set_threads if true_root else library.set_threads
    return MklRoot(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))
