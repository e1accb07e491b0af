"""Base of the engines: admission of requests, the in-flight table, the watchdog, closing."""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod

from tiered_zero.concurrency.failure_latch import FailureLatch
from tiered_zero.concurrency.interrupts import STOPPED_S
from tiered_zero.errors import TransferError
from tiered_zero.io.disk_file import DiskFile, memory_address, open_descriptor
from tiered_zero.io.engine import File, IOEngine, IOSettings, IOTransfer, Request
from tiered_zero.io.watch import dump_in_flight
from tiered_zero.sizes import PAGE_NBYTES

_SLICE_S = 0.25
"""A wait returns to Python this often, so that signal handlers run (as of Ctrl-C) and stalls are seen."""

_POLL_S = 0.005
"""The shortest wait for a request that hangs: it may be about to complete."""


class DiskTransfer(IOTransfer):
    """A request of a DiskEngine. Holds the request's memory until it is done."""

    def __init__(self, engine: DiskEngine, file: DiskFile, request: Request) -> None:
        self.engine, self.file, self.request = engine, file, request
        self.submitted_s = time.monotonic()
        self.error: TransferError | None = None
        """What went wrong, once finished."""

    @abstractmethod
    def finished_within(self, timeout_s: float) -> bool:
        """Block at most `timeout_s`; True once finished."""

    @abstractmethod
    def progressed_s(self) -> float:
        """time.monotonic() of the last sign of life: this request's, or the engine's while it is still queued."""

    def wait(self) -> None:
        self.engine.check_process(self.request.path)
        begun_s = looked_s = time.monotonic()
        while not self.finished_within(min(_SLICE_S, max(_POLL_S, self._patience_s(begun_s)))):
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > STOPPED_S:
                begun_s = looked_s  # the workers have not run either
            if self._patience_s(begun_s) <= 0.0:
                raise self.engine.stall(self)
        if self.error is not None:
            raise self.error

    def _patience_s(self, begun_s: float) -> float:
        """Seconds for which it may still go on without a sign of life. Of many requests that hang, one is waited for
        to the limit; the others hang as long already."""
        since_s = self.progressed_s() if self.engine.has_stalled else max(begun_s, self.progressed_s())
        return since_s + self.engine.io_timeout_s - time.monotonic()


class DiskEngine(IOEngine):
    """An engine over file descriptors. Requests may be submitted from any thread, and not across a fork."""

    def __init__(self, *, direct: bool, alignment: int, settings: IOSettings, io_timeout_s: float) -> None:
        """`alignment`: of O_DIRECT requests, 512 or 4096; 1 if not `direct`."""
        assert direct or alignment == 1, "buffered files need no alignment"
        self.direct, self.alignment, self.settings = direct, alignment, settings
        self.io_timeout_s = io_timeout_s
        self.latch = FailureLatch()
        self._pid = os.getpid()
        self._closed = False
        self._stopped = False
        self.has_stalled = False
        # A dict as an ordered set: each operation on it is atomic, so that a signal handler can read it at any time.
        self._unfinished: dict[DiskTransfer, None] = {}

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> DiskFile:
        fd = open_descriptor(path, create=create, writable=writable, direct=self.direct)
        return DiskFile(path, fd, alignment=self.alignment, direct=self.direct, drain=self._drain)

    def read(self, file: File, offset: int, into: memoryview, *, urgent: bool = False) -> IOTransfer:
        if into.readonly:
            raise TransferError(f"read at offset {offset} of {file.path}: the memory to read into is read-only")
        return self._submit("read", file, offset, into, urgent)

    def write(self, file: File, offset: int, data: memoryview) -> IOTransfer:
        return self._submit("write", file, offset, data)

    def sync(self, file: File) -> IOTransfer:
        return self._submit("sync", file, 0, memoryview(b""))

    def in_flight(self) -> list[tuple[Request, float]]:
        now_s = time.monotonic()
        return [
            (transfer.request, now_s - transfer.submitted_s)
            for transfer in list(self._unfinished)
            if not transfer.done()
        ]

    def drain(self) -> None:
        self._drain()

    def close(self) -> None:
        self._closed = True
        if not self._stopped:  # nor if a second Ctrl-C broke off the wait
            idle = self._drain()
            if self._pid == os.getpid():
                self._stop(idle)
            self._stopped = True

    def stall(self, transfer: DiskTransfer) -> TransferError:
        """The error of a request without progress; latches, because its memory may still be written to."""
        request = transfer.request
        error = TransferError(
            f"{request.kind} of {request.nbytes} bytes at offset {request.offset} of {request.path} made no progress "
            f"for {self.io_timeout_s:g} s (tiered_zero.io_timeout_s). Look at the kernel log (dmesg) and the device; "
            f"raise the limit if it is merely slow.\n{dump_in_flight(self)}"
        )
        self.has_stalled = True
        self.latch.set(error)
        return error

    def check_process(self, path: str) -> None:
        """Raises TransferError in a forked child."""
        if self._pid != os.getpid():
            raise TransferError(f"{path}: an I/O engine has no workers in a forked process; open one there")

    @abstractmethod
    def _start(self, file: DiskFile, request: Request, view: memoryview) -> DiskTransfer:
        """Hand an admitted request to the workers and enter it into `_unfinished`."""

    @abstractmethod
    def _stop(self, idle: bool) -> None:
        """End the workers; `idle` is False if some are stuck in a system call and must be abandoned."""

    def _submit(self, kind: str, file: File, offset: int, data: memoryview, urgent: bool = False) -> IOTransfer:
        assert isinstance(file, DiskFile), f"{file} was not opened by an engine on disk files"
        self._check_usable(file)
        view = data.cast("B") if data.nbytes else memoryview(b"")
        request = Request(kind=kind, path=file.path, offset=offset, nbytes=view.nbytes, urgent=urgent)
        if file.alignment > 1 and view.nbytes:
            _check_aligned(request, view, file.alignment)
        return self._start(file, request, view)

    def _check_usable(self, file: DiskFile) -> None:
        self.latch.check()
        if self._closed or file.fd < 0:
            raise TransferError(f"{file.path}: the {'engine' if self._closed else 'file'} has been closed")
        self.check_process(file.path)

    def _drain(self, file: DiskFile | None = None) -> bool:
        """Wait for what is in flight (of one file, or all), but not again after a stall; False if it is stuck."""
        if self._pid != os.getpid():
            return True
        for transfer in list(self._unfinished):
            if file is None or transfer.file is file:
                with contextlib.suppress(TransferError):
                    transfer.finished_within(0.0) if self.has_stalled else transfer.wait()
                if not transfer.done():
                    return False
        return True


def _check_aligned(request: Request, view: memoryview, alignment: int) -> None:
    address = memory_address(view)
    if request.offset % alignment or request.nbytes % alignment or address % alignment:
        raise TransferError(
            f"{request.kind} at {request.path}: O_DIRECT needs multiples of {alignment}; found "
            f"offset {request.offset}, {request.nbytes} bytes, memory at {address:#x}. "
            f"Align extents and buffers to {PAGE_NBYTES}."
        )
