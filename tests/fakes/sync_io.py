"""A synchronous engine over real files: records what it did, holds requests back, and fails on demand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes.no_workers import FakeEngine, FakeTransfer
from tiered_zero.concurrency.transfer import FailureLatch
from tiered_zero.errors import TransferError
from tiered_zero.io.engine import File, IOTransfer, Request, file_error


@dataclass
class SyncFile(File):
    path: str
    fd: int

    def allocate(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            raise file_error("reserve", self.path, error.errno or 0) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class SyncTransfer(FakeTransfer):
    def __init__(self, request: Request, work: Callable[[], None]) -> None:
        self.request = request
        self._work: Callable[[], None] | None = work
        self._error: TransferError | None = None

    def finish(self) -> None:
        work, self._work = self._work, None
        try:
            if work:
                work()
        except TransferError as error:
            self._error = error

    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        self.finish()
        if self._error:
            raise self._error

    @property
    def seconds(self) -> float:
        return 0.001 if self.done() else 0.0


@dataclass(eq=False)
class SyncEngine(FakeEngine):
    """`operations`: ("write", path, offset, bytes), ("read", path, offset, nbytes), ("sync", path), in order.

    `before(kind, n)`: called ahead of the n-th request of a kind (from 1); raise OSError there to fail it.
    `held`: requests that are done only when `release` is called or their transfer is waited on (None: done at once).
    """

    name = "sync"
    before: Callable[[str, int], None] = lambda kind, n: None
    held: list[SyncTransfer] | None = None
    operations: list[tuple[object, ...]] = field(default_factory=list)
    latch: FailureLatch = field(default_factory=FailureLatch)

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> SyncFile:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        self.operations.append(("create" if create else "open", path))
        return SyncFile(path, os.open(path, flags, 0o600))

    def read(self, file: File, offset: int, into: memoryview, *, urgent: bool = False) -> IOTransfer:
        def work() -> None:
            data = os.pread(file.fd, len(into), offset)
            if len(data) != len(into):
                raise TransferError(f"{file.path}: {len(data)} of {len(into)} bytes at offset {offset}")
            into[:] = data

        request = Request(kind="read", path=file.path, offset=offset, nbytes=len(into), urgent=urgent)
        return self._submit(request, ("read", file.path, offset, len(into)), work)

    def write(self, file: File, offset: int, data: memoryview) -> IOTransfer:
        request = Request(kind="write", path=file.path, offset=offset, nbytes=len(data))
        return self._submit(
            request, ("write", file.path, offset, bytes(data)), lambda: os.pwrite(file.fd, data, offset)
        )

    def sync(self, file: File) -> IOTransfer:
        request = Request(kind="sync", path=file.path, offset=0, nbytes=0)
        return self._submit(request, ("sync", file.path), lambda: os.fdatasync(file.fd))

    def in_flight(self) -> list[tuple[Request, float]]:
        return [(transfer.request, 0.0) for transfer in self.held or () if not transfer.done()]

    def drain(self) -> None:
        self.release()

    def close(self) -> None:
        self.release()

    def release(self) -> None:
        for transfer in self.held or ():
            transfer.finish()

    def _submit(self, request: Request, operation: tuple[object, ...], act: Callable[[], object]) -> IOTransfer:
        self.latch.check()
        self.operations.append(operation)
        number = sum(entry[0] == request.kind for entry in self.operations)

        def work() -> None:
            try:
                self.before(request.kind, number)
                act()
            except OSError as error:
                failure = TransferError(f"{request.kind} of {request.path} at {request.offset}: {error}")
                self.latch.set(failure)
                raise failure from error

        transfer = SyncTransfer(request, work)
        if self.held is None:
            transfer.finish()
        else:
            self.held.append(transfer)
        return transfer
