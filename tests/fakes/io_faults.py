"""An I/O engine that fails where it is told to, around a real one."""

import errno
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from tiered_zero.errors import TransferError
from tiered_zero.io.disk_file import transfer_error
from tiered_zero.io.engine import ErrorLatch, File, IOEngine, Request, Ticket
from tiered_zero.io.watch import dump_in_flight


@dataclass(frozen=True)
class Fault:
    """What befalls the `nth` request (from 1) of a `kind`: "read", "write" or "sync".

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


@final
class FaultyEngine(IOEngine):
    """Passes everything on to `inner`, except for the faults; like a real engine, latches with the first failure."""

    def __init__(self, inner: IOEngine, faults: Sequence[Fault] = (), *, io_timeout_s: float = 20.0) -> None:
        self.name = f"faulty {inner.name}"
        self.inner = inner
        self.io_timeout_s = io_timeout_s
        self.requests: list[Request] = []
        """Everything submitted, in order."""
        self.latch = ErrorLatch()
        self.stalled: dict[_StalledTicket, None] = {}
        self._faults = {(fault.kind, fault.nth): fault for fault in faults}
        self._counts: Counter[str] = Counter()

    def add(self, *faults: Fault) -> None:
        """More faults, counted from the engine's first request on."""
        self._faults |= {(fault.kind, fault.nth): fault for fault in faults}

    def count(self, kind: str) -> int:
        """Requests of a kind so far: `Fault(kind, engine.count(kind) + 1)` befalls the next."""
        return self._counts[kind]

    def release(self) -> None:
        """Let what is stalled go on."""
        for ticket in list(self.stalled):
            ticket.released.set()

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        return self.inner.open(path, create=create, writable=writable)

    def read(self, file: File, offset: int, into: memoryview) -> Ticket:
        fault = self._admit("read", file, offset, into.nbytes)
        if fault is None:
            return self._passed(self.inner.read(file, offset, into))
        if fault.effect == "flip":
            return _FlippedTicket(self, self.inner.read(file, offset, into), into, fault.at)
        if fault.effect == "short":
            self.inner.read(file, offset, into[: _half(into, file)]).wait()
        return self._failed(fault)

    def write(self, file: File, offset: int, data: memoryview) -> Ticket:
        fault = self._admit("write", file, offset, data.nbytes)
        if fault is None:
            return self._passed(self.inner.write(file, offset, data))
        if fault.effect == "flip":
            _flip(data, fault.at)  # in place and back: a copy would not be aligned
            rotten = self.inner.write(file, offset, data)
            rotten.wait()
            _flip(data, fault.at)
            return self._passed(rotten)
        if fault.effect in ("torn", "short"):
            half = self.inner.write(file, offset, data[: _half(data, file)])
            if fault.effect == "torn":
                return half
            half.wait()
        return self._failed(fault)

    def sync(self, file: File) -> Ticket:
        fault = self._admit("sync", file, 0, 0)
        return self._passed(self.inner.sync(file)) if fault is None else self._failed(fault)

    def in_flight(self) -> list[tuple[Request, float]]:
        now_s = time.monotonic()
        stalled = [(ticket.request, now_s - ticket.submitted_s) for ticket in list(self.stalled)]
        return stalled + self.inner.in_flight()

    def close(self) -> None:
        self.release()
        self.inner.close()

    def _admit(self, kind: str, file: File, offset: int, nbytes: int) -> Fault | None:
        self.latch.check()
        self.requests.append(Request(kind, file.path, offset, nbytes))
        self._counts[kind] += 1
        return self._faults.pop((kind, self._counts[kind]), None)

    def _passed(self, ticket: Ticket) -> Ticket:
        return _WatchedTicket(self, ticket)

    def _failed(self, fault: Fault) -> Ticket:
        request = self.requests[-1]
        if fault.effect == "stall":
            return _StalledTicket(self, request)
        code = fault.effect if isinstance(fault.effect, int) else errno.EIO
        got = request.nbytes // 2 if fault.effect == "short" else 0
        error = transfer_error(request, request.offset, request.nbytes, got, code)
        self.latch.set(error)
        return _FailedTicket(request, error)


class _WatchedTicket(Ticket):
    """A ticket of the inner engine; its own failures latch the outer one too."""

    def __init__(self, engine: FaultyEngine, inner: Ticket) -> None:
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
class _FlippedTicket(_WatchedTicket):
    def __init__(self, engine: FaultyEngine, inner: Ticket, into: memoryview, at: int) -> None:
        super().__init__(engine, inner)
        self._into: memoryview | None = into
        self._at = at

    def wait(self) -> None:
        super().wait()
        if self._into is not None:
            _flip(self._into, self._at)
            self._into = None


@final
class _FailedTicket(Ticket):
    seconds = 1e-9

    def __init__(self, request: Request, error: TransferError) -> None:
        self.request, self._error = request, error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise self._error


@final
class _StalledTicket(Ticket):
    """Done once released, having moved nothing: a test that releases it has seen what it wanted to see."""

    seconds = 0.0

    def __init__(self, engine: FaultyEngine, request: Request) -> None:
        self.request = request
        self.released = threading.Event()
        self.submitted_s = time.monotonic()
        self._engine = engine
        engine.stalled[self] = None

    def done(self) -> bool:
        return self.released.is_set()

    def wait(self) -> None:
        if not self.released.wait(self._engine.io_timeout_s):
            error = TransferError(
                f"{self.request.kind} of {self.request.path} made no progress for {self._engine.io_timeout_s:g} s"
                f"\n{dump_in_flight(self._engine)}"
            )
            self._engine.latch.set(error)
            raise error
        self._engine.stalled.pop(self, None)


def _half(data: memoryview, file: File) -> int:
    return data.nbytes // 2 // file.alignment * file.alignment


def _flip(data: memoryview, at: int) -> None:
    data.cast("B")[at] ^= 1
