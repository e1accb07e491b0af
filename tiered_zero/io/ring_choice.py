"""Threads or io_uring for the native engine's pool: which is faster, found out in the real directory.

All processors are kept busy meanwhile, as by an update: a ring that holds its own on an idle machine may fall behind
then, when its one thread waits for a turn where of several threads some have theirs.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

from tiered_zero.errors import ConfigError, TransferError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.measure import measure_rate
from tiered_zero.io.native import NativeEngine
from tiered_zero.sizes import MIB, align_up, format_nbytes

_LEAST_NBYTES, _MOST_NBYTES = 16 * MIB, 32 * MIB
_NUM_IN_FLIGHT: Final = 4
_SLICE_S: Final = 0.02
_NUM_ROUNDS: Final = 3
"""In each the ring must be at least as fast: so short a slice errs by a tenth, and threads are what is known to do."""

_MOST_BUSY: Final = 16

_PATIENCE_S: Final = 0.05
"""Longer than this to write the trial's file: the disk is too slow to be timed in passing, and threads keep up."""


class Rates(NamedTuple):
    """Bytes/s of reading and writing mixed, of each for a moment in turn; or why there are none."""

    threads: float = 0.0
    ring: float = 0.0
    untimed: str = ""

    @property
    def ring_wins(self) -> bool:
        return self.ring >= self.threads and not self.untimed

    def __str__(self) -> str:
        threads, ring = (f"{format_nbytes(rate)}/s" for rate in (self.threads, self.ring))
        return self.untimed or f"it moves {ring} there, threads {threads}"


Key = tuple[int, IOSettings]
_known: dict[Key, Rates] = {}
"""By st_dev and settings, for as long as the process lives: of many engines the first one pays."""
_lock = threading.Lock()


def known_rates(directory: str, settings: IOSettings) -> Rates | None:
    return _known.get(_key(directory, settings))


def compare_rates(directory: str, like: NativeEngine) -> Rates:
    """Time engines of both kinds and the settings of `like` on a file there (mode 0600, removed), about 0.2 s in all,
    once for each file system and settings. A disk that is full or slow or fails is no error: that is the answer."""
    key = _key(directory, like.settings)
    with _lock:
        if key not in _known:
            try:
                with closing(like.another(io_uring=False)) as threads, closing(like.another(io_uring=True)) as ring:
                    _known[key] = _time(directory, threads, ring)
            except (ConfigError, TransferError, OSError) as error:
                _known[key] = Rates(untimed=f"it cannot be timed there: {error}")
        return _known[key]


def _key(directory: str, settings: IOSettings) -> Key:
    return os.stat(directory).st_dev, settings


def _time(directory: str, threads: NativeEngine, ring: NativeEngine) -> Rates:
    """Raises OSError, TransferError."""
    settings = threads.settings
    nbytes = min(align_up(settings.block_nbytes * settings.num_workers, MIB), _MOST_NBYTES)
    nbytes = max(nbytes, _LEAST_NBYTES)
    status = os.statvfs(directory)
    if status.f_bavail * status.f_frsize < 4 * nbytes:
        return Rates(untimed=f"it cannot be timed with {format_nbytes(status.f_bavail * status.f_frsize)} free there")
    path = os.path.join(directory, f".tiered-zero-probe-{secrets.token_hex(8)}")
    measure = partial(
        measure_rate, path=path, nbytes=nbytes, mode="mixed", seconds=_SLICE_S,
        request_nbytes=nbytes // _NUM_IN_FLIGHT, num_in_flight=_NUM_IN_FLIGHT, one_memory=True,
    )  # fmt: skip
    worst: Rates | None = None
    try:
        took_s = _fill(threads, path, nbytes)
        if took_s > _PATIENCE_S:
            return Rates(untimed=f"the disk took {took_s:.1g} s to write {format_nbytes(nbytes)}: threads keep up")
        with _busy_processors():
            for _ in range(_NUM_ROUNDS):
                rates = Rates(measure(threads), measure(ring))
                if worst is None or rates.ring / rates.threads < worst.ring / worst.threads:
                    worst = rates
                if not rates.ring_wins:
                    break
    finally:
        with suppress(OSError):
            os.unlink(path)
    assert worst is not None
    return worst


@contextmanager
def _busy_processors() -> Iterator[None]:
    """While this is open a thread for each computes, without the GIL."""
    ended = threading.Event()
    block = bytes(MIB)

    def compute() -> None:
        while not ended.is_set():
            hashlib.sha256(block)

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(min(os.cpu_count() or 1, _MOST_BUSY))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _fill(engine: NativeEngine, path: str, nbytes: int) -> float:
    """Create a file of random bytes, for blocks never written are read without the disk. Seconds of the writing."""
    random = memoryview(mmap.mmap(-1, MIB))
    random[:] = os.urandom(MIB)
    file = engine.open(path, create=True)
    try:
        begun_s = time.perf_counter()
        for ticket in [engine.write(file, offset, random) for offset in range(0, nbytes, MIB)]:
            ticket.wait()
        return time.perf_counter() - begun_s
    finally:
        file.close()
