"""Call the update kernel (update.c) with ctypes: set its instruction set and threads. Nothing here imports torch."""

from __future__ import annotations

import ctypes
import enum
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import NamedTuple, final

from tiered_zero.native import declare, load, struct_fields
from tiered_zero.system import cgroup_folders, read_text

LEVELS = {"avx512": 1, "avx2": 0, "neon": 2}
"""Name of a level (an instruction set) -> its number in update.c, best first."""

NUM_FREE_CORES = 2
"""The number of cores that the kernel leaves free if an accelerator computes: for lanes, and for the driver thread,
which launches compute."""

ADDRESSES_PER_SLICE = 8
"""The number of 64-bit numbers in a row of the table for `UpdateKernel.update`."""


class Dtype(enum.IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    REMAINDER = 3
    """The low half of a master, as an int16; only for Adam. The kernel adds it to the high half, the bfloat16 `out`.
    The masters half a step above and half a step below `out` have the same remainder. The sign bit of the second moment
    distinguishes these two (see rules/state_layout.py)."""


class Rule(enum.IntEnum):
    ADAM = 0
    SGD = 1
    ADAGRAD = 2
    LION = 3


class Flag(enum.IntFlag):
    MAXIMIZE = 1
    L2 = 2
    AMSGRAD = 4
    MOMENTUM = 8
    NESTEROV = 16
    FIRST = 32
    """The momentum buffer is empty: the kernel copies the gradient to it."""
    TORCH_ROOT = 64
    """Compute square roots with the kernel's `root`, MKL's function, which does not always round correctly."""
    NEWTON_ROOT = 128
    """Compute square roots with the rounding of MKL's generic code, which is not always correct."""


class Hyper(ctypes.Structure):
    """The numbers of one step, equal for all elements of a slice: struct tz_hyper of update.c."""

    _fields_ = struct_fields(
        (ctypes.c_int32, "rule flags grad_type master_type out_type state_type"),
        (ctypes.c_uint32, "seed"),
        (ctypes.c_float, "grad_scale l2 decay weight1 beta2 weight2 root2 eps rate"),
    )


class Moments(ctypes.Structure):
    """One array of 8-bit moments to convert: the struct tz_moments of update.c. `encode`: 1 converts floats to codes, 0
    converts codes to floats."""

    _fields_ = struct_fields(
        (ctypes.c_void_p, "codes scales values table"),
        (ctypes.c_int64, "numel"),
        (ctypes.c_int32, "is_signed encode"),
        (ctypes.c_uint32, "seed reserved"),
    )


class MklRoot(NamedTuple):
    """The addresses of MKL's functions VMSSQRT_ and MKL_Set_Num_Threads_Local."""

    square_root: int
    set_threads: int


CopyNorm = tuple[int, int | None, int, Dtype, Dtype, bool]
"""(source, target, numel, source_type, target_type, add): the fields of `_CopyNormArgs`."""


class _CopyNormArgs(ctypes.Structure):
    """One array to copy, whose norm the kernel may compute. `source`, `target`: addresses; without a target nothing is
    copied. `add`: whether to add the array to the target instead of copying it. The types are numbers of `Dtype`."""

    _fields_ = struct_fields(
        (ctypes.c_void_p, "source target"),
        (ctypes.c_int64, "numel"),
        (ctypes.c_int32, "source_type target_type add reserved"),
    )


@final
class UpdateKernel:
    """Calls the functions of update.c with one instruction set (level) and a pool of threads. Any thread may call; if
    the pool is busy, a call uses only its own thread. A forked child may use the kernel too. Calls release the GIL.
    Results have the same bits at each level and with any number of threads."""

    def __init__(
        self, path: Path, level: str | None = None, num_threads: int | None = None, root: MklRoot | None = None
    ) -> None:
        """`level`: one of `supported_levels(path)`, which must not be empty; default: the best. `num_threads`: default:
        `available_cpus()`. `root`: MKL's square root, for Flag.TORCH_ROOT. Raises OSError if `path` is no library, and
        ConfigError if it was built from another version of the C sources."""
        self.path = path
        self._library = _bind(path)
        self.level = level or supported_levels(path)[0]
        self.num_threads = max(1, num_threads or available_cpus())
        self.root = root
        self._pool = self._library.tz_pool_open(self.num_threads)
        if not self._pool:
            raise MemoryError("no memory for the update kernel's threads")
        self._end = weakref.finalize(self, self._library.tz_pool_close, self._pool)
        self._end.atexit = False  # exit ends the threads, and a last update may still run

    def update(self, table: int, num_slices: int) -> None:
        """Take one optimizer step on `num_slices` slices. `table`: the address of a table with one row for each slice.
        A row has ADDRESSES_PER_SLICE 64-bit numbers: the addresses of master, gradient, out (or 0) and three state
        arrays (or 0), the number of elements, and the address of the slice's `Hyper`. Addresses must be valid during
        the call."""
        self._check(
            self._library.tz_update_batch(
                self._pool, table, num_slices, LEVELS[self.level], *(self.root or (None, None))
            )
        )

    def square_roots(self, values: int, roots: int, numel: int, flags: Flag) -> None:
        """Write the square roots of `values` to `roots`. Compute them as an update with `flags` does. `values`,
        `roots`: addresses of [numel] fp32, valid during the call. `numel`: a multiple of 16."""
        functions = self.root or (None, None)
        self._check(self._library.tz_square_roots(values, roots, numel, flags, LEVELS[self.level], *functions))

    def convert(self, moments: Moments) -> None:
        """Convert 8-bit moments to floats or back. The memory must be valid during the call."""
        self._check(self._library.tz_convert_moments(self._pool, ctypes.byref(moments), LEVELS[self.level]))

    def copy(self, copies: Sequence[CopyNorm]) -> None:
        """Copy or add arrays, on all threads. Targets must not overlap. All addresses must be valid during the call."""
        table = _copy_table(copies)
        self._check(self._library.tz_copy_arrays(self._pool, table, len(copies), LEVELS[self.level]))

    def copy_norms(self, copies: Sequence[CopyNorm], *, fused_tail: bool, threaded: bool = False) -> list[float]:
        """Make `copies`: copy each source to its target, add it to the target, or, without a target, only read it.
        Return the fp32 L2 norm of each target (without a target, of the source). Squares are summed in the order of
        ATen's vector_norm. `fused_tail`: whether ATen was compiled with FMA. `threaded`: whether to run on the kernel's
        threads; targets must then not overlap. Addresses must be valid during the call."""
        table, norms = _copy_table(copies), (ctypes.c_float * len(copies))()
        pool = self._pool if threaded else None
        self._check(self._library.tz_copy_norms(pool, table, len(copies), fused_tail, norms, LEVELS[self.level]))
        return list(norms)

    def close(self) -> None:
        """End the threads. Idempotent. The kernel must not be used afterwards."""
        self._end()
        self._pool = None

    def _check(self, status: int) -> None:
        if status == -1:
            raise MemoryError("no memory for the update kernel's table of slices; nothing was updated")
        assert status == 0, f"update kernel: status {status} at level {self.level}"


def _copy_table(copies: Sequence[CopyNorm]) -> ctypes.Array[_CopyNormArgs]:
    return (_CopyNormArgs * len(copies))(*starmap(_CopyNormArgs, copies))


def supported_levels(path: Path) -> list[str]:
    """List the levels of the library `path` that this processor runs, best first. Raises OSError if `path` is no
    library, and ConfigError if it was built from another version of the C sources."""
    library = _bind(path)
    return [name for name, number in LEVELS.items() if library.tz_supported(number)]


def _bind(path: Path) -> ctypes.CDLL:
    library, pointer, integer, count = load(path), ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    declare(library.tz_supported, integer, integer)
    declare(library.tz_pool_open, pointer, integer)
    declare(library.tz_pool_close, None, pointer)
    declare(library.tz_update_batch, integer, pointer, pointer, count, integer, pointer, pointer)
    declare(library.tz_square_roots, integer, pointer, pointer, count, integer, integer, pointer, pointer)
    declare(library.tz_convert_moments, integer, pointer, pointer, integer)
    declare(library.tz_copy_arrays, integer, pointer, pointer, count, integer)
    declare(library.tz_copy_norms, integer, pointer, pointer, count, integer, pointer, integer)
    return library


def available_cpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Return how many threads this process may keep busy: its share of the host's CPUs, at most its affinity and the
    CPU quota of its cgroups. `root`: the root of the file system to read (for tests)."""
    # OMP_NUM_THREADS is ignored: launchers set it to 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = environment.get("LOCAL_WORLD_SIZE", "1")
    local_ranks = max(1, int(given)) if given.isdigit() else 1
    if cpus == os.cpu_count():
        cpus //= local_ranks
    return max(1, int(min(cpus, _cgroup_quota(root) / local_ranks)))


def num_kernel_threads(*, shares_cores: bool) -> int:
    """Return how many threads a run's update kernel gets. `shares_cores`: whether the CPU also computes the model."""
    return available_cpus() if shares_cores else max(1, available_cpus() - NUM_FREE_CORES)


def _cgroup_quota(root: Path) -> float:
    """Return the smallest CPU quota of this process's cgroups, in CPUs; infinity if no cgroup has a quota."""
    quotas = [float("inf")]
    for folder in cgroup_folders("cpu", root / "proc", root / "sys/fs/cgroup"):
        v1 = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        with suppress(ValueError):  # no such file, or "max"
            allowed, period = map(float, read_text(folder / "cpu.max").split() or v1)
            quotas += [allowed / period] if allowed > 0 else []
    return min(quotas)
