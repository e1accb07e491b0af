"""Define the interface between the store of records and the engines that move aligned bytes to and from files.

Print the requests in flight as a table: in the error of a request without progress, and on a signal that the program
has chosen."""

from __future__ import annotations

import os
import signal
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import FrameType

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.sizes import GIB, MIB, PAGE_NBYTES, align_up


@dataclass(frozen=True, kw_only=True)
class IOSettings:
    """The `aio` section of the configuration, and what each key does in each engine.

    `block_size`: bytes per system call; aiofiles uses up to 4 neighbouring blocks of a large request, to take the GIL
    less often. `queue_depth` x `intra_op_parallelism`: the number of workers, and thus of calls in flight at once, in
    all engines; at most 32, which saturate the fastest array of drives.

    The defaults, on a virtio disk of 3.4 GB/s read and 6.6 written: alone, 2 MiB x 8 comes within 2..5% of the best of
    0.5..4 MiB x 2..16, but a training step takes 3..7% less time with 4 MiB x 16, because workers are late for their
    next block. An urgent read waits for what is in flight, at most 64 MiB."""

    block_size: int = 4 * MIB
    queue_depth: int = 16
    intra_op_parallelism: int = 1

    @property
    def block_nbytes(self) -> int:
        """`block_size` as whole pages, and at most what one system call can move."""
        return min(align_up(max(self.block_size, 1), PAGE_NBYTES), GIB)

    @property
    def num_workers(self) -> int:
        return min(max(self.queue_depth * self.intra_op_parallelism, 1), 32)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One requested transfer, for error texts and the in-flight table. `kind`: "read", "write" or "sync". `offset`,
    `nbytes`: bytes (0 for a sync). `urgent`: only for reads, see `IOEngine.read`."""

    kind: str
    path: str
    offset: int
    nbytes: int
    urgent: bool = False


class File(ABC):
    """An open file of an engine. Offsets, lengths and addresses of requests are multiples of `alignment`."""

    path: str
    alignment: int
    """1 for a buffered file, 512 or 4096 for O_DIRECT."""

    @abstractmethod
    def allocate(self, nbytes: int) -> None:
        """Reserve disk blocks up to `nbytes` (posix_fallocate). Raises TransferError if the disk is full."""

    @abstractmethod
    def close(self) -> None: ...


class IOTransfer(Transfer):
    """One request of an engine, of any size. The engine owns the request's memory from submission until `done()`.
    `wait` raises TransferError; it does so after `io_timeout_s` without progress at the latest."""

    request: Request

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Seconds from submission to completion; 0.0 while in flight."""


class IOEngine(ABC):
    """Moves bytes between files and caller-owned memory, asynchronously. The first failure latches the engine: every
    later submission raises that failure again."""

    name: str

    @abstractmethod
    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        """Open (or create, mode 0600, O_EXCL|O_NOFOLLOW) a data file. Raises TransferError."""

    @abstractmethod
    def read(self, file: File, offset: int, into: memoryview, *, urgent: bool = False) -> IOTransfer:
        """Start to read. `urgent`: a thread waits for this read, so it goes ahead of all requests that are not urgent;
        blocks that a worker has begun go on. Requests that are not urgent wait while there are urgent ones; the caller
        must limit the number of these."""

    @abstractmethod
    def write(self, file: File, offset: int, data: memoryview) -> IOTransfer: ...

    @abstractmethod
    def sync(self, file: File) -> IOTransfer:
        """Start an fdatasync after all writes submitted before it. A failure latches the engine; the sync is never
        retried."""

    @abstractmethod
    def in_flight(self) -> list[tuple[Request, float]]:
        """Return the unfinished requests, each with its age in seconds."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until no earlier request is in flight, except stuck ones."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is in flight, and stop the workers. Idempotent."""


_MAX_ROWS = 32

_watched: weakref.WeakSet[IOEngine] = weakref.WeakSet()


def dump_in_flight(engine: IOEngine) -> str:
    """Format the engine's unfinished requests as a table, oldest first: age, kind, size, offset, path."""
    requests = sorted(engine.in_flight(), key=lambda entry: -entry[1])
    lines = [f"I/O engine {engine.name}: {len(requests)} requests in flight"]
    for request, age_s in requests[:_MAX_ROWS]:
        lines.append(
            f"  {age_s:8.1f} s  {request.kind:<5}  {request.nbytes:>12} bytes at {request.offset:<14} {request.path}"
        )
    if len(requests) > _MAX_ROWS:
        lines.append(f"  ... and {len(requests) - _MAX_ROWS} younger ones")
    return "\n".join(lines)


def watch(engine: IOEngine) -> None:
    """Show the requests of `engine` in the tables of `dump_on` for as long as the engine exists."""
    _watched.add(engine)


def dump_on(number: int) -> None:
    """Print every run's disk requests in flight to stderr each time the process gets the signal `number`, such as
    `signal.SIGUSR1`; then call the previous handler. Call this in the main thread. Nothing else in the package handles
    the signal, so without this call SIGUSR1 ends a process."""

    def dump(number: int, frame: FrameType | None) -> None:
        for engine in list(_watched):
            os.write(2, (dump_in_flight(engine) + "\n").encode())
        if callable(previous):
            previous(number, frame)

    previous = signal.signal(number, dump)
