"""Threads or io_uring for the native engine's pool: which is faster, found out in the real directory."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import time
from typing import Final, NamedTuple

from tiered_zero.errors import TransferError
from tiered_zero.io.direct import NativeEngine
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.measure import measure_rate
from tiered_zero.sizes import MIB, align_up, format_nbytes

_LEAST_NBYTES, _MOST_NBYTES = 16 * MIB, 32 * MIB
_NUM_IN_FLIGHT: Final = 4
_NUM_SLICES: Final = 3
_SLICE_S: Final = 0.02
_ENOUGH_S: Final = 0.15
"""No further slices after this."""

_PATIENCE_S: Final = 0.05
"""Longer than this to write the trial's file: the disk is too slow to be timed in passing, and threads keep up."""


class Rates(NamedTuple):
    """Bytes/s of reading and writing mixed, the best of some short slices; or the reason that there are none."""

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


def compare_rates(directory: str, threads: NativeEngine, ring: NativeEngine) -> Rates:
    """Time two idle engines of the same settings on a file there (mode 0600, removed), about 0.2 s in all, once for
    each file system and settings. A disk that is full or slow is no error: the reason is the answer."""
    key = _key(directory, threads.settings)
    with _lock:
        if key not in _known:
            _known[key] = _time(directory, threads, ring)
        return _known[key]


def _key(directory: str, settings: IOSettings) -> Key:
    return os.stat(directory).st_dev, settings


def _time(directory: str, threads: NativeEngine, ring: NativeEngine) -> Rates:
    settings = threads.settings
    nbytes = min(align_up(settings.block_nbytes * settings.num_workers, MIB), _MOST_NBYTES)
    nbytes = max(nbytes, _LEAST_NBYTES)
    status = os.statvfs(directory)
    if status.f_bavail * status.f_frsize < 4 * nbytes:
        return Rates(untimed=f"it cannot be timed with {format_nbytes(status.f_bavail * status.f_frsize)} free there")
    path = os.path.join(directory, f".tiered-zero-probe-{secrets.token_hex(8)}")
    best = {threads: 0.0, ring: 0.0}
    try:
        took_s = _fill(threads, path, nbytes)
        if took_s > _PATIENCE_S:
            return Rates(untimed=f"the disk took {took_s:.1g} s to write {format_nbytes(nbytes)}: threads keep up")
        begun_s = time.perf_counter()
        for number in range(_NUM_SLICES):
            if number and time.perf_counter() - begun_s > _ENOUGH_S:
                break
            for engine in best:
                rate = measure_rate(
                    engine, path, nbytes, "mixed", _SLICE_S,
                    request_nbytes=nbytes // _NUM_IN_FLIGHT, num_in_flight=_NUM_IN_FLIGHT, one_memory=True,
                )  # fmt: skip
                best[engine] = max(best[engine], rate)
    except (OSError, TransferError) as error:
        return Rates(untimed=f"it cannot be timed there: {error}")
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return Rates(best[threads], best[ring])


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
