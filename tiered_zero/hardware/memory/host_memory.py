"""Allocate host memory: one block of exactly the planned size. Slots and staging pools take parts of this block.

A staging pool leases buffers of equal size. `HeapTrim` trims malloc's heap, for activations that move to disk.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import time
from pathlib import Path
from typing import final

import torch

from tiered_zero.errors import BudgetError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.probe import near_cpus
from tiered_zero.native.update import available_cpus
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.system import map_memory, touch_pages
from tiered_zero.telemetry.spans import Ledger, Recorder

_MAPPED_NBYTES = 128 * 1024
"""The least bytes for which `temporary_zeros` makes a separate memory mapping. It equals malloc's initial limit."""


def trim_malloc() -> None:
    """Return the free memory of malloc's heap to the system. Takes a few milliseconds. Does nothing without glibc."""
    # Without trims, units' freed initial values leave holes of up to 32 MiB: glibc raises its limit for separate
    # mappings to the largest block freed.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def temporary_zeros(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU for temporary use. A large tensor gets a memory mapping of its own."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MAPPED_NBYTES:
        return torch.zeros(shape, dtype=dtype)
    # On malloc's heap small blocks would lie between such tensors, and the heap would grow with each of them.
    return torch.frombuffer(map_memory(nbytes), dtype=dtype).view(shape)


def typed_view(raw: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return the start of `raw`, [n] uint8, viewed as `numel` elements of `dtype`. Raises BudgetError if `raw` is too
    short."""
    nbytes = numel * dtype.itemsize
    if nbytes > raw.numel():
        raise BudgetError(f"{numel} elements of {dtype} need {nbytes} bytes; this memory has {raw.numel()}")
    return raw[:nbytes].view(dtype)


UNPINNED_KINDS = frozenset({"state", "commit", "commit_param", "commit_copy", "bucket"})
"""Kinds of slots that are not pinned, because the CPU works on their bytes in place."""


@final
class HostArena:
    """The host memory of a run: one anonymous, page-aligned mapping of the planned size. `take` returns parts of it,
    one after the other; all parts are freed together. Used on the driver thread. `pin`: whether to pin each part that
    is taken, except for UNPINNED_KINDS."""

    def __init__(self, capacity_nbytes: int, accelerator: Accelerator, pin: bool, ledger: Ledger) -> None:
        self.capacity_nbytes = align_up(max(capacity_nbytes, 1), PAGE_NBYTES)
        self._accelerator = accelerator
        self._ledger = ledger
        # not inherited by forked children: a child's copy-on-write would replace pages under a direct transfer in
        # flight (open(2), O_DIRECT notes)
        mapping = map_memory(self.capacity_nbytes, "MADV_DONTFORK", "MADV_HUGEPAGE")
        self._tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._taken_nbytes = 0
        self._charged: list[tuple[str, int]] = []
        """(kind, bytes) of each part that was taken."""
        self._pin = pin
        self._near_cpus = near_cpus(accelerator.device) if pin else set()
        self._pinned: dict[int, int] = {}
        """Address of a pinned part -> its size in bytes."""
        self.poison(self._tensor)

    @property
    def pinned_nbytes(self) -> int:
        """The number of bytes that the device can copy directly."""
        return sum(self._pinned.values())

    def take(self, nbytes: int, kind: str) -> torch.Tensor:
        """Return unused pages of the arena: [n] uint8 with n >= `nbytes` and undefined content. `kind`: the name under
        which the ledger counts these bytes. Raises BudgetError if the arena has too few bytes left."""
        size = align_up(max(nbytes, 1), PAGE_NBYTES)  # torch's pinned allocator would take a power of two
        if size > (left_nbytes := self.capacity_nbytes - self._taken_nbytes):
            raise BudgetError(
                f"{kind} needs {format_nbytes(size)} of the host arena; of {format_nbytes(self.capacity_nbytes)}, "
                f"{format_nbytes(left_nbytes)} are left. This run has left its plan."
            )
        self._ledger.charge("host", kind, size)
        self._charged.append((kind, size))
        memory = self._tensor[self._taken_nbytes :][:size]
        self._taken_nbytes += size
        if self._pin and kind not in UNPINNED_KINDS:
            touch_pages(memory.data_ptr(), size, available_cpus(), self._near_cpus)  # near the GPU
            if self._accelerator.pin(memory.data_ptr(), size):
                self._pinned[memory.data_ptr()] = size
        return memory

    def poison(self, pages: torch.Tensor) -> None:
        """Overwrite `pages`, [n] uint8, with fp32 NaN in debug mode."""
        self._accelerator.poison(pages, torch.float32)

    def close(self) -> None:
        """Unpin the memory. Views of the arena stay valid; the memory is freed with the last view. Idempotent."""
        for kind, nbytes in self._charged:
            self._ledger.discharge("host", kind, nbytes)
        self._charged.clear()
        for address in self._pinned:
            self._accelerator.unpin(address)
        self._pinned.clear()
        self._tensor = torch.empty(0, dtype=torch.uint8)


logger = logging.getLogger("tiered_zero")


@final
class Lease:
    """Ownership of one staging buffer, until `release()` (any thread; idempotent) or the end of a `with` block.

    `tensor`: [n] uint8; n is the requested number of bytes, rounded up to whole pages. After the release, n is 0.
    """

    def __init__(self, pool: StagingPool, index: int, holder: str, tensor: torch.Tensor) -> None:
        self._pool = pool
        self._index = index
        self.holder = holder
        self.since_s = time.monotonic()
        self.tensor = tensor

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first `numel` elements of the buffer as `dtype`. Raises BudgetError if the buffer is too short."""
        return typed_view(self.tensor, dtype, numel)

    def release(self) -> None:
        self._pool._release(self, self._index)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@final
class StagingPool:
    """Leases `count` buffers of `buffer_nbytes` each, which it takes from the arena. Any thread may use it."""

    def __init__(
        self,
        arena: HostArena,
        buffer_nbytes: int,
        count: int,
        kind: str,
        recorder: Recorder,
        timeout_s: float = 300.0,
    ) -> None:
        """Take the buffers from the arena. `timeout_s`: the most seconds that `lease` waits; a longer wait counts as a
        deadlock."""
        self.buffer_nbytes = align_up(buffer_nbytes, PAGE_NBYTES)
        self.count = count
        self.kind = kind
        self._arena = arena
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._memory = arena.take(self.buffer_nbytes * count, kind)
        self._changed = threading.Condition()
        self._leased: dict[int, Lease] = {}
        self._free = list(range(count))[::-1]
        """Indices of the free buffers. The buffer that was released last is leased first."""
        self._closed = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lease_nowait(self, nbytes: int, holder: str = "") -> Lease | None:
        """Lease a buffer if one is free now; else return None. Raises BudgetError if `nbytes` exceeds a buffer's
        size."""
        with self._changed:
            return self._lease(nbytes, holder)

    def lease(self, nbytes: int, holder: str = "", lane: str = "compute") -> Lease:
        """Lease a buffer. If none is free, wait for one, and record the wait on `lane`. `holder`: the caller's name;
        the error after the timeout lists all holders. Raises BudgetError after the timeout, or if `nbytes` exceeds a
        buffer's size."""
        with self._changed:
            if (lease := self._lease(nbytes, holder)) is not None:
                return lease
            with self._recorder.span(lane, "wait_lease", f"{self.kind} {holder}".strip()):
                # two waits: if the process is stopped (Ctrl-Z) during the first, the holders have the second
                half_s = self._timeout_s / 2
                in_time = any(self._changed.wait_for(lambda: self._free or self._closed, half_s) for _ in range(2))
            if not in_time:
                raise BudgetError(self._describe_deadlock(holder))
            lease = self._lease(nbytes, holder)
            assert lease is not None, "woken with a free buffer under the lock"
            return lease

    def holders(self) -> list[tuple[str, float]]:
        """Return (holder, age of the lease in seconds) of each leased buffer, oldest first."""
        now_s = time.monotonic()
        with self._changed:
            return [(lease.holder, now_s - lease.since_s) for lease in self._leased.values()]

    def reclaim(self) -> None:
        """Release every lease. Called after the holders were aborted, when no transfer uses the buffers."""
        for lease in list(self._leased.values()):
            lease.release()

    def close(self) -> None:
        """Close the pool: waiting threads and later leases raise BudgetError. Log the leases that are still held.
        Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for holder, age_s in self.holders():
            logger.error("a %s buffer was still leased at close, by %s for %.1f s", self.kind, holder, age_s)

    def _lease(self, nbytes: int, holder: str) -> Lease | None:
        """Lease a free buffer; return None if there is none. The caller holds the lock. Raises BudgetError if `nbytes`
        exceeds a buffer's size, or if the pool is closed."""
        if nbytes > self.buffer_nbytes:
            raise BudgetError(
                f"a lease of {format_nbytes(nbytes)} ({nbytes} bytes) was asked of the {self.kind} buffers; each has "
                f"{format_nbytes(self.buffer_nbytes)} ({self.buffer_nbytes} bytes). This run has left its plan."
            )
        if self._closed:
            raise BudgetError(f"the {self.kind} buffers are closed; {holder or 'a caller'} asked for one")
        if not self._free:
            return None
        index = self._free.pop()
        start = index * self.buffer_nbytes
        end = start + align_up(max(nbytes, 1), PAGE_NBYTES)
        holder = holder or threading.current_thread().name
        lease = Lease(self, index, holder, self._memory[start:end])
        self._leased[index] = lease
        return lease

    def _release(self, lease: Lease, index: int) -> None:
        with self._changed:
            if self._leased.get(index) is not lease:
                return
            self._changed.notify()  # the woken thread continues once the lock is free
            del self._leased[index]
            self._free.append(index)
            tensor, lease.tensor = lease.tensor, lease.tensor[:0]
            if not self._closed:
                self._arena.poison(tensor)

    def _describe_deadlock(self, holder: str) -> str:
        table = "".join(f"\n  {age_s:8.1f} s  {name}" for name, age_s in self.holders())
        return (
            f"{holder or threading.current_thread().name} waited {self._timeout_s:g} s for one of {self.count} "
            f"{self.kind} buffers; none was released. Held, oldest first, by:{table}\n"
            "This is a stalled transfer or a deadlock in the schedule; the run can be resumed from its last checkpoint."
        )


@final
class HeapTrim:
    """Trims malloc's heap when its holes, the free bytes that are still resident, have grown. Does nothing without
    mallinfo2 (glibc 2.33). Used by one thread.

    With GPT-2 30M, 752 MiB were resident after a step with trims, and 950 to 1,003 MiB without. A separate mapping for
    each large block (M_MMAP_THRESHOLD) leaves no holes, but a step then took a third more CPU time.
    """

    def __init__(self, nbytes: int) -> None:
        """Measure the holes in the heap. `nbytes`: each time this many bytes have moved, the holes are measured again.
        If they have grown by more than `nbytes`, the heap is trimmed."""
        self._nbytes = nbytes
        self._moved_nbytes = 0
        self._info = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _Mallinfo2
            self._least_nbytes = self._unused_nbytes()

    def add(self, nbytes: int) -> None:
        """Count a moved block of `nbytes`. Trim the heap if its holes have grown too much."""
        self._moved_nbytes += nbytes
        if self._info is None or self._moved_nbytes < self._nbytes:
            return
        self._moved_nbytes = 0
        found = self._unused_nbytes()
        if found - self._least_nbytes > self._nbytes:
            trim_malloc()
            found = self._least_nbytes = self._unused_nbytes()
        self._least_nbytes = min(found, self._least_nbytes)

    def _unused_nbytes(self) -> int:
        """Return the process's resident bytes, less the bytes of malloc's used blocks: holes in the heap, and memory
        that does not come from malloc."""
        info = self._info()  # type: ignore[misc]
        num_pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return num_pages * mmap.PAGESIZE - int(info.uordblks) - int(info.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """The result of mallinfo2(3). `uordblks`: bytes in use in heaps. `hblkhd`: bytes in separate mappings."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]
