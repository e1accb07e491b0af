"""What the runtime needs of a device: ordered lanes of work besides compute, memory figures.

[Note: Lanes]
A lane is a worker thread with a device stream of its own: `gather` carries parameters to the device, `reduce` carries
gradients to the host. A job is a plain function; it may first wait for a disk transfer (so nvme -> host -> device needs
no callback from an I/O worker) and then launches copies. Each job is a transfer, which its consumer waits for.
The driver thread (or autograd's) is the `compute` lane: `record_compute` marks what it has launched so far,
`wait_on_compute` orders everything that it launches from now on after a transfer. On the CPU both reduce to threading.
Transfers of lanes and marks of compute order streams; any other transfer (the disk's) is waited for on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiered_zero.hardware.huge_pages import PageRange
from tiered_zero.transfer import Transfer


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Device memory as the device's own allocator counts it, in bytes. `free_nbytes`: what no process has taken."""

    allocated_nbytes: int
    peak_allocated_nbytes: int
    reserved_nbytes: int
    free_nbytes: int


class Lane(ABC):
    """An ordered queue of jobs on a worker thread."""

    name: str

    @abstractmethod
    def submit(
        self,
        job: Callable[[], None],
        after: Sequence[Transfer] = (),
        holds: Sequence[torch.Tensor] = (),
        waits: bool = True,
    ) -> Transfer:
        """Run `job` on this lane's thread and stream, after all earlier jobs and after `after`.

        `holds`: device tensors that the job reads or writes, referenced until it is launched. Free their memory only
        after `wait_on_compute(transfer)` or `transfer.wait()`: the allocator knows of no stream but compute.
        `waits`: False of a job that waits for nothing but `after`. Where the device is the CPU and nothing is before
        it, it runs at once on the calling thread: on its own thread it would take a core from compute.
        Returns the transfer that is done when the job is complete on the device. Any thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish queued jobs and stop the thread. Idempotent."""


class Accelerator(ABC):
    """The device: `Cuda` or `Cpu`. `shares_cores`: compute and the host's own work take each other's time."""

    name: str
    device: torch.device
    shares_cores = False

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """The lane of that name, started at first use."""

    @abstractmethod
    def record_compute(self) -> Transfer:
        """Mark everything that the calling thread has launched on compute so far."""

    @abstractmethod
    def wait_on_compute(self, transfer: Transfer) -> None:
        """Order what the calling thread launches on compute from now on after `transfer`; raise its error.

        Blocks the host only as far as the device needs it to (on the CPU: until the transfer is done).
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        """Launch target <- source (contiguous, same dtype and size) on the calling lane's stream.

        `finish`: return only when the bytes are there, because the caller is about to reuse the host memory.
        Starts no threads and leaves autograd's version counters alone.
        """

    def release_cached_memory(self) -> None:
        """Return what the device's allocator keeps for reuse, before an allocation that failed is tried again."""
        return

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything launched. For measurements and shutdown only."""

    @abstractmethod
    def prepare(self, flat: torch.Tensor) -> None:
        """`flat` on the device has just been given memory, whose content is undefined: poisoned in debug mode."""

    def reserve_place(self, nbytes: int, window_nbytes: int) -> PageRange | None:
        """Reserve addresses for a flat that is fetched and evicted; all such flats hold at most `window_nbytes` at
        once. None where the device's allocator is to give it memory."""
        return None

    def host_pages(self, flat: torch.Tensor) -> memoryview | None:
        """The whole pages that begin with `flat` on the device, where the disk can write to them without a copy."""
        return None

    @abstractmethod
    def poison(self, flat: torch.Tensor) -> None:
        """In debug mode overwrite `flat` (any float or integer dtype) with NaN or a pattern; else do nothing."""

    @abstractmethod
    def total_memory_nbytes(self) -> int:
        """Memory of the device; for the CPU device the configured limit, or what the host has available."""

    @abstractmethod
    def memory_figures(self) -> MemoryFigures | None:
        """None where the device has no allocator that counts (the CPU: the ledger counts there)."""

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> bool:
        """Register host memory for direct copies. False (once logged, with the reason) where it cannot be."""

    @abstractmethod
    def unpin(self, address: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
