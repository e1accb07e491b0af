"""Wrap a real I/O engine, and fail the requests that a test names."""

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from tests.fakes.no_workers import FakeEngine, FakeTransfer
from tiered_zero.concurrency.transfer import FailureLatch
from tiered_zero.errors import TransferError
from tiered_zero.io.engine import File, IOEngine, IOTransfer, Request, dump_in_flight, transfer_error


@dataclass(frozen=True)
class Fault:
    """What happens to the `nth` request (from 1) of a `kind`: "read", "write" or "sync".

    `extent`: only requests that begin at these offsets of the file `path` count, from when the fault is added on.

    `effect`:
    an errno   the request fails with it, and nothing moves;
    "short"    the first half moves, then the request fails with EIO;
    "torn"     of a write: the first half moves and success is reported, as by a drive that lost power;
    "flip"     all moves and success is reported, with bit 0 of byte `at` flipped (in the file, or in memory);
    "stall"    nothing moves until `FaultyEngine.release()`; then the request goes on.
    """

    kind: str
    nth: int
    effect: int | str = errno.EIO
    at: int = 0
    path: str = ""
    extent: range | None = None

    def concerns(self, request: Request) -> bool:
        if request.kind != self.kind:
            return False
        return self.extent is None or (request.path == self.path and request.offset in self.extent)


@final
class FaultyEngine(FakeEngine):
    """Passes everything on to `inner`, except for the faults; like a real engine, latches with the first failure."""

    def __init__(self, inner: IOEngine, faults: Sequence[Fault] = (), *, io_timeout_s: float = 120.0) -> None:
        self.name = f"faulty {inner.name}"
        self.inner = inner
        self.io_timeout_s = io_timeout_s
        self.requests: list[Request] = []
        """Everything submitted, in order."""
        self.latch = FailureLatch()
        self.stalled: dict[_StalledTransfer, None] = {}
        self._lock = threading.Lock()
        self._left: dict[Fault, int] = {}
        self._counts: Counter[str] = Counter()
        self.add(*faults)

    def add(self, *faults: Fault) -> None:
        """More faults; those without an extent are counted from the engine's first request on."""
        for fault in faults:
            self._left[fault] = fault.nth - (self._counts[fault.kind] if fault.extent is None else 0)

    def count(self, kind: str) -> int:
        """Requests of a kind so far: `Fault(kind, engine.count(kind) + 1)` happens to the next."""
        return self._counts[kind]

    @property
    def num_waiting(self) -> int:
        """Faults that have not befallen any request yet."""
        return len(self._left)

    def release(self) -> None:
        """Let what is stalled go on."""
        for transfer in list(self.stalled):
            transfer.release()

    def expire(self) -> None:
        """End the patience with what is stalled, as `io_timeout_s` does."""
        for transfer in list(self.stalled):
            transfer.has_expired = True
            transfer.released.set()

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        return self.inner.open(path, create=create, writable=writable)

    def read(self, file: File, offset: int, into: memoryview, *, urgent: bool = False) -> IOTransfer:
        fault, request = self._admit("read", file, offset, into.nbytes)
        read = partial(self.inner.read, file, offset, urgent=urgent)
        if fault is None:
            return self._passed(read(into))
        if fault.effect == "flip":
            return _FlippedTransfer(self, read(into), into, fault.at)
        if fault.effect == "stall":
            return _StalledTransfer(self, request, lambda: read(into))
        if fault.effect == "short":
            read(into[: _half(into, file)]).wait()
        return self._failed(fault, request)

    def write(self, file: File, offset: int, data: memoryview) -> IOTransfer:
        fault, request = self._admit("write", file, offset, data.nbytes)
        if fault is None:
            return self._passed(self.inner.write(file, offset, data))
        if fault.effect == "flip":
            whole = self.inner.write(file, offset, data)
            whole.wait()
            flip_in_file(file.path, offset + fault.at)
            return self._passed(whole)
        if fault.effect == "stall":
            return _StalledTransfer(self, request, lambda: self.inner.write(file, offset, data))
        if fault.effect in ("torn", "short"):
            half = self.inner.write(file, offset, data[: _half(data, file)])
            if fault.effect == "torn":
                return half
            half.wait()
        return self._failed(fault, request)

    def sync(self, file: File) -> IOTransfer:
        fault, request = self._admit("sync", file, 0, 0)
        if fault is None:
            return self._passed(self.inner.sync(file))
        if fault.effect == "stall":
            return _StalledTransfer(self, request, lambda: self.inner.sync(file))
        return self._failed(fault, request)

    def in_flight(self) -> list[tuple[Request, float]]:
        now_s = time.monotonic()
        stalled = [(transfer.request, now_s - transfer.submitted_s) for transfer in list(self.stalled)]
        return stalled + self.inner.in_flight()

    def drain(self) -> None:
        self.inner.drain()

    def close(self) -> None:
        """What is stalled is dropped, as by a process that ends."""
        for transfer in list(self.stalled):
            transfer.released.set()
        self.inner.close()

    def _admit(self, kind: str, file: File, offset: int, nbytes: int) -> tuple[Fault | None, Request]:
        """Any thread. The fault of this request, if it has one."""
        self.latch.check()
        request = Request(kind=kind, path=file.path, offset=offset, nbytes=nbytes)
        struck = None
        with self._lock:
            self.requests.append(request)
            self._counts[kind] += 1
            for fault in [fault for fault in self._left if fault.concerns(request)]:
                self._left[fault] -= 1
                if self._left[fault] == 0:
                    struck = fault
                    del self._left[fault]
        return struck, request

    def _passed(self, transfer: IOTransfer) -> IOTransfer:
        return _WatchedTransfer(self, transfer)

    def _failed(self, fault: Fault, request: Request) -> IOTransfer:
        code = fault.effect if isinstance(fault.effect, int) else errno.EIO
        got = request.nbytes // 2 if fault.effect == "short" else 0
        error = transfer_error(request, request.offset, request.nbytes, got, code)
        self.latch.set(error)
        return _FailedTransfer(request, error)


class _WatchedTransfer(FakeTransfer):
    """A transfer of the inner engine; its own failures latch the outer one too."""

    def __init__(self, engine: FaultyEngine, inner: IOTransfer) -> None:
        self.engine, self.inner, self.request = engine, inner, inner.request

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> None:
        try:
            self.inner.wait()
        except TransferError as error:
            self.engine.latch.set(error)
            raise

    @property
    def seconds(self) -> float:
        return self.inner.seconds


@final
class _FlippedTransfer(_WatchedTransfer):
    def __init__(self, engine: FaultyEngine, inner: IOTransfer, into: memoryview, at: int) -> None:
        super().__init__(engine, inner)
        self._into: memoryview | None = into
        self._at = at

    def wait(self) -> None:
        super().wait()
        if self._into is not None:
            self._into.cast("B")[self._at] ^= 1
            self._into = None


@final
class _FailedTransfer(FakeTransfer):
    seconds = 1e-9

    def __init__(self, request: Request, error: TransferError) -> None:
        self.request, self._error = request, error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise self._error


@final
class _StalledTransfer(FakeTransfer):
    """Moves nothing until it is released; only then is the request made of the engine inside."""

    seconds = 0.0

    def __init__(self, engine: FaultyEngine, request: Request, start: Callable[[], IOTransfer]) -> None:
        self.request = request
        self.released = threading.Event()
        self.waited_for = threading.Event()
        """Set once a thread waits for it."""
        self.has_expired = False
        self.submitted_s = time.monotonic()
        self._engine = engine
        self._start = start
        self._inner: IOTransfer | None = None
        engine.stalled[self] = None

    def release(self) -> None:
        if not self.released.is_set():
            self._inner = self._start()
            self.released.set()

    def done(self) -> bool:
        return self.released.is_set() and (self._inner is None or self._inner.done())

    def wait(self) -> None:
        self.waited_for.set()
        if not self.released.wait(self._engine.io_timeout_s) or self.has_expired:
            error = TransferError(
                f"{self.request.kind} of {self.request.nbytes} bytes at offset {self.request.offset} of "
                f"{self.request.path} made no progress for {self._engine.io_timeout_s:g} s"
                f"\n{dump_in_flight(self._engine)}"
            )
            self._engine.latch.set(error)
            raise error
        self._engine.stalled.pop(self, None)
        if self._inner is None:
            raise TransferError(f"{self.request.kind} of {self.request.path} was given up")
        self._inner.wait()


def _half(data: memoryview, file: File) -> int:
    return data.nbytes // 2 // file.alignment * file.alignment


def flip_in_file(path: str, offset: int) -> None:
    """Bit 0 of one byte, past every engine: what was written stays right in memory."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
