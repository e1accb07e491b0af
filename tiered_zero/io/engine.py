"""Define the base class of the I/O engines, which move aligned bytes between files and memory. The base class opens
files, checks requests, detects requests without progress, and writes the text of every failure."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import numpy

from tiered_zero.concurrency.transfer import FailureLatch, Transfer
from tiered_zero.errors import TransferError
from tiered_zero.sizes import GIB, MIB, PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.system import Descriptor, opened

# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IOSettings:
    """The `aio` section of the configuration. `block_size`: bytes that one system call moves; with aiofiles up to four
    times as many. The number of workers is `queue_depth` x `intra_op_parallelism`, at most 32. Each worker makes one
    system call at a time."""

    # 2 MiB x 8 is within 5% of the best on an idle machine; a training step takes 3..7% less time with 4 MiB x 16
    block_size: int = 4 * MIB
    queue_depth: int = 16
    intra_op_parallelism: int = 1

    @property
    def block_nbytes(self) -> int:
        """`block_size`, rounded up to whole pages, and at most 1 GiB, so that one system call can move a block."""
        return min(align_up(max(self.block_size, 1), PAGE_NBYTES), GIB)

    @property
    def num_workers(self) -> int:
        return min(max(self.queue_depth * self.intra_op_parallelism, 1), 32)  # 32 saturate the fastest array of drives


@dataclass(frozen=True, kw_only=True)
class Request:
    """Describes a transfer, for error texts and the table of requests in flight. `kind`: "read", "write" or "sync"."""

    kind: str
    path: str
    offset: int
    nbytes: int
    urgent: bool = False


# -- requests in flight ------------------------------------------------------------------------------------------------

_MAX_ROWS = 32

_watched: weakref.WeakSet[IOEngine] = weakref.WeakSet()


def dump_in_flight(engine: IOEngine) -> str:
    """Return a table, as text, of the engine's oldest unfinished requests (at most 32): age, kind, size, offset,
    path."""
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
    """Include the requests of `engine` in the tables that `dump_on` prints."""
    _watched.add(engine)


def dump_on(number: int) -> None:
    """Install a handler for the signal `number`, such as `signal.SIGUSR1`. It prints a table of disk requests in flight
    to stderr, then calls the previous handler. Call this in the main thread."""

    def dump(number: int, frame: FrameType | None) -> None:
        for engine in list(_watched):
            os.write(2, (dump_in_flight(engine) + "\n").encode())
        if callable(previous):
            previous(number, frame)

    previous = signal.signal(number, dump)


# -- texts of failures -------------------------------------------------------------------------------------------------

_ADVICE = {
    errno.ENOSPC: "Free space there, or point the swap directory to a larger disk.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or use a file system that takes larger files.",
    errno.EDQUOT: "Raise the disk quota, or point the swap directory to another disk.",
    errno.EIO: "The device reported a failure: look at the kernel log (dmesg) and the drive's health (smartctl -a).",
    errno.ENODATA: "The drive cannot read a sector any more (medium error): replace it (smartctl -a).",
    errno.EINVAL: "The file system refused this O_DIRECT transfer: it needs another alignment, or buffered access.",
    errno.EROFS: "The file system is mounted read-only, often after an error: look at the kernel log (dmesg).",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "The machine's table of open files is full: raise fs.file-max.",
    errno.ENOENT: "The file or its directory is gone: has something removed the swap directory?",
    errno.EEXIST: "Another run owns this file, or left it behind.",
    errno.ELOOP: "The path is a symbolic link, which is refused: name the file itself.",
    errno.EACCES: "Give this user the right to read and write there.",
    errno.ESTALE: "The network file system lost the file: use a local disk.",
}
_ADVICE_ELSE = "Look at the kernel log (dmesg) for the cause."


def errno_text(code: int) -> str:
    """Format an errno: 5 becomes "EIO (Input/output error)"."""
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


def errno_advice(code: int) -> str:
    """Return advice for the user about the errno `code` of a file operation."""
    return _ADVICE.get(code, _ADVICE_ELSE)


def free_text(path: str) -> str:
    """Return a text about the free space of the file system of `path`. The file may be gone."""
    with contextlib.suppress(OSError):
        status = os.statvfs(os.path.dirname(path) or ".")
        return f"{format_nbytes(status.f_bavail * status.f_frsize)} free there"
    return "free space there unknown"


def file_error(act: str, path: str, code: int) -> TransferError:
    """Return a TransferError for a file operation that failed with errno `code`. `act`: the operation, such as
    "open"."""
    text = f"cannot {act} {path}: {errno_text(code)}; {free_text(path)}. {errno_advice(code)}"
    return _with_errno(text, code)


def transfer_error(request: Request, at: int, wanted: int, got: int, code: int) -> TransferError:
    """Return a TransferError for a request that failed with errno `code`. `at`: the file offset of the failed block.
    `wanted`: the number of bytes in this block. `got`: the number moved."""
    if request.kind == "sync":
        what = f"sync of {request.path} failed"
        advice = "Writes since the last sync may be lost: resume from the last checkpoint."
    else:
        what = f"{request.kind} of {request.nbytes} bytes at offset {request.offset} of {request.path} failed"
        what += f": at offset {at} wanted {wanted} bytes, got {got}"
        advice = _ADVICE.get(code, _ADVICE_ELSE)
    text = f"{what}: {errno_text(code)}; {free_text(request.path)}. {advice}"
    return _with_errno(text, code)


def end_of_file_error(request: Request, at: int, wanted: int, got: int, file_nbytes: int) -> TransferError:
    return TransferError(
        f"read of {request.nbytes} bytes at offset {request.offset} of {request.path} met the end of the file: "
        f"at offset {at} wanted {wanted} bytes, got {got}; the file has {file_nbytes} bytes. "
        "Something cut it short: it cannot be used any more."
    )


def _with_errno(text: str, code: int) -> TransferError:
    """Return a TransferError that has this text and this `errno`."""
    error = TransferError(text)
    error.errno = code  # without `filename`: OSError would then print another text
    return error


def memory_address(view: memoryview) -> int:
    """Return the address of a contiguous view's memory, valid while the view lives."""
    return int(numpy.asarray(view).__array_interface__["data"][0])


# -- the engine --------------------------------------------------------------------------------------------------------

_SLICE_S = 0.25
"""The longest time in seconds of one blocking wait. Between waits, signal handlers (Ctrl-C) run and stalls are
detected."""

_POLL_S = 0.005
"""The shortest time in seconds of one blocking wait. A request whose timeout has passed still gets this time, because
it may be about to complete."""

_STOPPED_S = 5.0
"""If a wait finds more than this many seconds between two clock checks, the process was stopped (Ctrl-Z, suspend). The
wait's timeout then leaves out that time."""


class File:
    """An open file of an engine. `direct`: whether it was opened with O_DIRECT. `drain`: called by `close`; waits until
    no request of the file is in flight, and returns False if one is stuck."""

    def __init__(self, path: str, fd: Descriptor, *, direct: bool, drain: Callable[[File], bool]) -> None:
        self.path, self.direct = path, direct
        self.fd = int(fd)
        self._descriptor, self._drain = fd, drain

    @property
    def alignment(self) -> int:
        """Bytes of which each request's offset, length and memory address are multiples."""
        return PAGE_NBYTES if self.direct else 1

    def allocate(self, nbytes: int) -> None:
        """Reserve disk blocks for the first `nbytes` of the file. Raises TransferError if the disk is full."""
        try:
            if not self._fallocate(nbytes):
                self._fill_with_zeros(nbytes)
        except OSError as error:
            act = f"reserve {format_nbytes(nbytes)} ({nbytes} bytes) for"
            raise file_error(act, self.path, error.errno or errno.EIO) from error

    def _fallocate(self, nbytes: int) -> bool:
        """Reserve disk blocks with posix_fallocate. Return False if the file system does not support this."""
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            # glibc then writes instead, which fails on a file opened with O_DIRECT
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
                return False
            raise
        return True

    def _fill_with_zeros(self, nbytes: int) -> None:
        """Reserve disk blocks without posix_fallocate: append zeros until the file has `nbytes`."""
        position, end = (align_up(size, self.alignment) for size in (self.size_nbytes(), nbytes))
        with mmap.mmap(-1, MIB) as zeros, memoryview(zeros) as view:
            while position < end:
                os.lseek(self.fd, position, os.SEEK_SET)
                position += os.write(self.fd, view[: min(MIB, end - position)])

    def sync(self) -> None:
        """Sync the file, and drop its pages from memory. Raises OSError."""
        os.fdatasync(self.fd)
        self.drop_pages(0, 0)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to write out and drop cached pages of a buffered file. `nbytes`: 0 means up to the end of the
        file."""
        if not self.direct:  # the plan of host memory does not count these pages
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def size_nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close the file. Idempotent. If a request is stuck, the file's descriptor stays open."""
        # with a request stuck, a late write would go to the next file that gets the descriptor's number
        if self.fd >= 0 and self._drain(self):
            self._descriptor.close()
        self.fd = -1


class IOTransfer(Transfer):
    """One request of an engine. The engine owns the request's memory until `done()`. `wait` raises TransferError if the
    request fails, or makes no progress for `io_timeout_s`."""

    def __init__(self, engine: IOEngine, file: File, request: Request) -> None:
        self.engine, self.file, self.request = engine, file, request
        self.submitted_s = time.monotonic()
        self.error: TransferError | None = None
        """The error of a finished request that failed; else None."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Seconds from submission to completion; 0.0 while in flight."""

    @abstractmethod
    def finished_within(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` seconds. Return whether the request is finished."""

    @abstractmethod
    def progressed_s(self) -> float:
        """Return the time (time.monotonic()) of the request's last progress. For a queued request, use the engine's
        last progress."""

    def wait(self) -> None:
        self.engine.check_process(self.request.path)
        begun_s = looked_s = time.monotonic()
        while not self.finished_within(min(_SLICE_S, max(_POLL_S, self._patience_s(begun_s)))):
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > _STOPPED_S:
                begun_s = looked_s  # this process was stopped, and the workers with it
            if self._patience_s(begun_s) <= 0.0:
                raise self.engine.stall(self)
        if self.error is not None:
            raise self.error

    def _patience_s(self, begun_s: float) -> float:
        """Return how many more seconds the request may go on without progress. `begun_s`: when the wait began."""
        # once a request has stalled only progress matters: if many hang, only the first wait takes the whole timeout
        since_s = self.progressed_s() if self.engine.has_stalled else max(begun_s, self.progressed_s())
        return since_s + self.engine.io_timeout_s - time.monotonic()


class IOEngine(ABC):
    """Moves bytes between files and caller-owned memory, asynchronously. Any thread may submit requests; a forked child
    may not. The first failure latches the engine: every later submission raises that failure again."""

    name: str

    def __init__(self, *, direct: bool, settings: IOSettings, io_timeout_s: float) -> None:
        """`direct`: whether to use O_DIRECT."""
        self.direct, self.settings = direct, settings
        self.io_timeout_s = io_timeout_s
        self.latch = FailureLatch()
        self._pid = os.getpid()
        self._closed = False
        self._stopped = False
        self.has_stalled = False
        # a dict as an ordered set: its operations are atomic, so a signal handler can read it at any time
        self._unfinished: dict[IOTransfer, None] = {}

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        """Open a data file. `create`: make the file, mode 0600; it must not exist. Raises TransferError."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if self.direct else 0
        try:
            fd = opened(path, flags, 0o600)
        except OSError as error:
            raise file_error("create" if create else "open", path, error.errno or errno.EIO) from error
        return File(path, fd, direct=self.direct, drain=self._drain)

    def read(self, file: File, offset: int, into: memoryview, *, urgent: bool = False) -> IOTransfer:
        """Start to fill `into` with the file's bytes from `offset` on. `urgent`: workers take this read before all
        requests that are not urgent. The caller must limit the number of urgent reads."""
        if into.readonly:
            raise TransferError(f"read at offset {offset} of {file.path}: the memory to read into is read-only")
        return self._submit("read", file, offset, into, urgent)

    def write(self, file: File, offset: int, data: memoryview) -> IOTransfer:
        return self._submit("write", file, offset, data)

    def sync(self, file: File) -> IOTransfer:
        """Start an fdatasync of the file. The caller must have waited for the writes that it is to make durable."""
        return self._submit("sync", file, 0, memoryview(b""))

    def in_flight(self) -> list[tuple[Request, float]]:
        """Return the unfinished requests, each with its age in seconds."""
        now_s = time.monotonic()
        return [
            (transfer.request, now_s - transfer.submitted_s)
            for transfer in list(self._unfinished)
            if not transfer.done()
        ]

    def drain(self) -> None:
        """Wait until all requests that were submitted before this call are complete. Return early if one is stuck."""
        self._drain()

    def close(self) -> None:
        """Wait for the requests in flight, and stop the workers. Idempotent."""
        self._closed = True
        if not self._stopped:  # also after a second Ctrl-C interrupted the wait
            idle = self._drain()
            if self._pid == os.getpid():
                self._stop(idle)
            self._stopped = True

    def stall(self, transfer: IOTransfer) -> TransferError:
        """Latch the engine, because `transfer` makes no progress, and return the error to raise."""
        request = transfer.request
        error = TransferError(
            f"{request.kind} of {request.nbytes} bytes at offset {request.offset} of {request.path} made no progress "
            f"for {self.io_timeout_s:g} s (tiered_zero.io_timeout_s). Look at the kernel log (dmesg) and the device; "
            f"raise the limit if it is merely slow.\n{dump_in_flight(self)}"
        )
        self.has_stalled = True
        self.latch.set(error)  # the disk may still write to the request's memory
        return error

    def check_process(self, path: str) -> None:
        """Raise TransferError in a forked child, which has no workers. `path`: the file, for the error."""
        if self._pid != os.getpid():
            raise TransferError(f"{path}: an I/O engine has no workers in a forked process; open one there")

    @abstractmethod
    def _start(self, file: File, request: Request, view: memoryview) -> IOTransfer:
        """Queue a checked request for the workers. Add its transfer to `_unfinished`, and return it."""

    @abstractmethod
    def _stop(self, idle: bool) -> None:
        """End the workers. `idle`: False if some workers are stuck in a system call and must be abandoned."""

    def _submit(self, kind: str, file: File, offset: int, data: memoryview, urgent: bool = False) -> IOTransfer:
        self._check_usable(file)
        view = data.cast("B") if data.nbytes else memoryview(b"")
        request = Request(kind=kind, path=file.path, offset=offset, nbytes=view.nbytes, urgent=urgent)
        if file.direct and view.nbytes:
            _check_aligned(request, view)
        return self._start(file, request, view)

    def _check_usable(self, file: File) -> None:
        self.latch.check()
        if self._closed or file.fd < 0:
            raise TransferError(f"{file.path}: the {'engine' if self._closed else 'file'} has been closed")
        self.check_process(file.path)

    def _drain(self, file: File | None = None) -> bool:
        """Wait until no request of `file` (None: of any file) is in flight. Return False if a request is stuck."""
        if self._pid != os.getpid():
            return True
        for transfer in list(self._unfinished):
            if file is None or transfer.file is file:
                with contextlib.suppress(TransferError):
                    # after a stall only look: others may be stuck too
                    transfer.finished_within(0.0) if self.has_stalled else transfer.wait()
                if not transfer.done():
                    return False
        return True


def _check_aligned(request: Request, view: memoryview) -> None:
    address = memory_address(view)
    if request.offset % PAGE_NBYTES or request.nbytes % PAGE_NBYTES or address % PAGE_NBYTES:
        raise TransferError(
            f"{request.kind} at {request.path}: O_DIRECT needs multiples of {PAGE_NBYTES}; found "
            f"offset {request.offset}, {request.nbytes} bytes, memory at {address:#x}."
        )
