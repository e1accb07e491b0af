"""Move bytes with the C thread pool of native/direct_io.c, through ctypes: the I/O engine `native`."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from pathlib import Path
from typing import Final, final

from tiered_zero.errors import ConfigError
from tiered_zero.io.engine import (
    File,
    IOEngine,
    IOSettings,
    IOTransfer,
    Request,
    end_of_file_error,
    errno_text,
    memory_address,
    transfer_error,
)
from tiered_zero.native import declare, find_library, load, struct_fields, why_missing

_KINDS: Final = {"read": 0, "write": 1, "sync": 2}
_END_OF_FILE: Final = -1
_NS: Final = 1_000_000_000

_abandoned: list[object] = []
"""Engines with a stuck worker, and their transfers. This list keeps them alive, because the kernel may still write to
the transfers' memory."""


class _Request(ctypes.Structure):
    """The C structure tz_request of block.h."""

    _fields_ = struct_fields(
        (ctypes.c_int32, "kind fd"),
        (ctypes.c_int64, "offset nbytes"),
        (ctypes.c_void_p, "memory"),
        (ctypes.c_int32, "alignment drop_pages urgent"),
        (ctypes.c_int64, "num_unclaimed num_running"),
        (ctypes.c_void_p, "previous next"),
        (ctypes.c_int64, "moved_ns submitted_ns finished_ns error_offset error_wanted error_got file_nbytes"),
        (ctypes.c_int32, "error finished"),
    )


@final
class _Library:
    """The functions of direct_io.c. Functions that may block release the GIL."""

    def __init__(self, path: Path) -> None:
        releasing, holding = load(path), ctypes.PyDLL(str(path))  # releasing the GIL costs more than a short call
        pool, request = ctypes.c_void_p, ctypes.POINTER(_Request)
        code, nbytes, nanoseconds = ctypes.c_int32, ctypes.c_int64, ctypes.c_int64
        self.open_pool = declare(holding.tz_pool_open, code, ctypes.c_int32, nbytes, ctypes.POINTER(pool))
        self.close_pool = declare(releasing.tz_pool_close, None, pool, ctypes.c_int32)
        self.free_pool = declare(holding.tz_pool_free, None, pool)
        self.submit = declare(holding.tz_submit, None, pool, request)
        self.wait = declare(releasing.tz_wait, ctypes.c_int32, pool, request, nanoseconds)
        self.poll = declare(holding.tz_wait, ctypes.c_int32, pool, request, nanoseconds)
        self.moved_ns = declare(holding.tz_moved_ns, nanoseconds, pool, request)
        self.failed = declare(holding.tz_failed, ctypes.c_int32, pool)


def load_library(path: Path | None = None) -> _Library:
    """Load the C library. Raises ConfigError with the reason if it is missing or cannot be loaded."""
    found = path or find_library("_direct_io")
    if found is None:
        raise ConfigError("its library is missing: {}; to have it: {}".format(*why_missing("_direct_io")))
    try:
        return _Library(found)
    except (OSError, AttributeError) as error:
        raise ConfigError(f"its library cannot be loaded: {error}") from error


@final
class NativeTransfer(IOTransfer):
    """A request of the native engine."""

    def __init__(self, engine: NativeEngine, file: File, request: Request, view: memoryview) -> None:
        super().__init__(engine, file, request)
        self._engine = engine
        self._view: memoryview | None = view
        # C reads it until the request is finished: `_unfinished` of the engine keeps this object alive until then
        self.raw = _Request(
            kind=_KINDS[request.kind],
            fd=file.fd,
            offset=request.offset,
            nbytes=request.nbytes,
            memory=memory_address(view),
            alignment=file.alignment,
            drop_pages=not file.direct,
            urgent=request.urgent,
        )

    def done(self) -> bool:
        return bool(self.raw.finished)

    def finished_within(self, timeout_s: float) -> bool:
        library, pool = self._engine.library, self._engine.pool
        if not library.poll(pool, self.raw, 0) and not library.wait(pool, self.raw, int(timeout_s * _NS)):
            return False
        self._engine.collect(self)
        return True

    def progressed_s(self) -> float:
        return float(self._engine.library.moved_ns(self._engine.pool, self.raw)) / _NS

    @property
    def seconds(self) -> float:
        return (self.raw.finished_ns - self.raw.submitted_ns) / _NS if self.raw.finished else 0.0

    def complete_io(self) -> None:
        """Release the memory of a finished request, and set `error` if the request failed. Called once."""
        self._view = None
        raw = self.raw
        block = (raw.error_offset, raw.error_wanted, raw.error_got)
        if raw.error == _END_OF_FILE:
            self.error = end_of_file_error(self.request, *block, raw.file_nbytes)
        elif raw.error:
            self.error = transfer_error(self.request, *block, raw.error)


@final
class NativeEngine(IOEngine):
    """Moves bytes with C threads. They need no GIL, so the transfer rate does not drop while Python code computes."""

    name = "native"

    def __init__(self, *, direct: bool, settings: IOSettings, io_timeout_s: float) -> None:
        """Load the library and start its threads. Raises ConfigError if either fails."""
        super().__init__(direct=direct, settings=settings, io_timeout_s=io_timeout_s)
        self.library = load_library()
        self.pool = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._open_pools = [self.pool]
        # runs when no transfer holds the engine any more: no thread uses the pool then
        weakref.finalize(self, _end_pool, os.getpid(), self.library, self.pool, self._open_pools).atexit = False
        code = self.library.open_pool(settings.num_workers, settings.block_nbytes, ctypes.byref(self.pool))
        if code:
            raise ConfigError(f"its {settings.num_workers} threads cannot be started: {errno_text(code)}")

    def collect(self, transfer: NativeTransfer) -> None:
        """Remove a finished transfer from `_unfinished`. If the transfer has failed, latch the engine. Idempotent; any
        thread may call it."""
        with self._lock:
            if transfer in self._unfinished:
                transfer.complete_io()
                if transfer.error is not None:
                    self.latch.set(transfer.error)
                del self._unfinished[transfer]

    def _start(self, file: File, request: Request, view: memoryview) -> NativeTransfer:
        transfer = NativeTransfer(self, file, request, view)
        with self._lock:  # keeps the table in the order of submission
            self._unfinished[transfer] = None
            self.library.submit(self.pool, transfer.raw)
        return transfer

    def _check_usable(self, file: File) -> None:
        """Remove finished transfers from `_unfinished`. Look at the two oldest transfers only, or at all after a
        failure. Then raise if the engine or the file cannot be used."""
        if not self._closed and self._pid == os.getpid():
            failed = self.library.failed(self.pool)  # after a failure all of them, else the oldest two
            for transfer in list(self._unfinished) if failed else self._oldest():
                if isinstance(transfer, NativeTransfer) and transfer.done():
                    transfer.finished_within(0.0)
        super()._check_usable(file)

    def _oldest(self) -> list[IOTransfer]:
        with self._lock:
            return [transfer for transfer, _ in zip(self._unfinished, range(2), strict=False)]

    def _stop(self, idle: bool) -> None:
        if not idle:
            _abandoned.append((self, list(self._unfinished)))
        while self._open_pools:
            self.library.close_pool(self._open_pools.pop(), not idle)


def _end_pool(pid: int, library: _Library, pool: ctypes.c_void_p, still_open: list[ctypes.c_void_p]) -> None:
    """Free the thread pool of an engine that was garbage-collected. `still_open`: [`pool`] if its threads must be
    stopped first; [] if they have stopped. Do nothing in a process other than `pid`."""
    if pool and os.getpid() == pid:
        while still_open:
            library.close_pool(still_open.pop(), 0)
        library.free_pool(pool)
