"""Measure the rate of an engine on a disk, for benchmarks and plans, and to weigh directories for striping."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tiered_zero.io.engine import IOEngine, IOTransfer
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.system import map_memory

MODES = ("read", "write", "mixed")

_SYNCED_NBYTES = 16 * MIB
_WEIGHED_NBYTES = 16 * MIB
_WEIGHED_NAME = ".weighed"
_MOST_ROUNDS, _LEAST_TRIAL_S = 3, 0.4


def fill_file(path: str, nbytes: int, seconds: float = math.inf) -> int:
    """Create a file, mode 0600, of random bytes: blocks that were never written are read without the disk. Return its
    size: whole MiB of `nbytes`, or as much as was written after `seconds`."""
    end_s = time.perf_counter() + seconds
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with open(fd, "wb") as file:
        for _ in range(nbytes // MIB):
            file.write(os.urandom(MIB))
            if file.tell() % _SYNCED_NBYTES == 0:
                file.flush()
                os.fsync(fd)
                if time.perf_counter() >= end_s:
                    break
        file.flush()
        os.fsync(fd)
        return file.tell()


def weigh_directories(engine: IOEngine, directories: Sequence[Path], nbytes: int) -> list[float]:
    """Return each directory's share of the bytes, in proportion to its speed; the shares sum to 1. Each directory is
    measured for a fifth of a second, by reads and writes, in a temporary file no larger than an equal share. `nbytes`:
    bytes to be striped in all. Rates that differ by less than a quarter count as equal. Raises TransferError,
    OSError."""
    size_nbytes = min(_WEIGHED_NBYTES, align_up(nbytes // len(directories), MIB))
    rates = []
    for directory in directories:
        path = directory / _WEIGHED_NAME
        try:
            fill_file(str(path), size_nbytes)
            rates.append(measure_rate(engine, str(path), size_nbytes, "mixed", 0.2, request_nbytes=MIB))
        finally:
            path.unlink(missing_ok=True)
    if max(rates) <= 1.25 * min(rates):
        rates = [1.0] * len(rates)
    return [rate / sum(rates) for rate in rates]


def measure_modes(engine: IOEngine, path: str, nbytes: int, seconds: float) -> dict[str, float]:
    """Measure the bytes/s of reading, writing, and both at once, in about `seconds` together. Each rate is the median
    of three trials, or of fewer if a trial would be shorter than 0.4 s. `nbytes`: bytes of the existing file `path` to
    use. Raises TransferError."""
    rounds = max(1, min(_MOST_ROUNDS, int(seconds / len(MODES) / _LEAST_TRIAL_S)))
    trial_s = seconds / len(MODES) / rounds
    found = [[measure_rate(engine, path, nbytes, mode, trial_s) for mode in MODES] for _ in range(rounds)]
    return {mode: statistics.median(rates) for mode, rates in zip(MODES, zip(*found, strict=True), strict=True)}


def measure_rate(
    engine: IOEngine,
    path: str,
    nbytes: int,
    mode: str,
    seconds: float,
    *,
    request_nbytes: int = 16 * MIB,
    num_in_flight: int = 4,
    one_memory: bool = False,
    read_share: float = 0.5,
) -> float:
    """Measure bytes/s of reading or writing an existing file's first `nbytes`, or both at once ("mixed"), over and
    over.

    Keeps `num_in_flight` requests in flight for `seconds`, as the tiers do, and counts completed ones. Writes random
    bytes, from memory like the runtime's. `one_memory`: all requests share the memory of one, which may then stay in
    the processor's cache. `read_share`: share of reads in the bytes of "mixed". Raises TransferError."""
    request_nbytes = min(request_nbytes, nbytes // num_in_flight // PAGE_NBYTES * PAGE_NBYTES)
    # huge pages: O_DIRECT pins each page of a transfer, and a device takes a limited number of pieces at once. With
    # pages of 4 KiB one virtio disk read at 0.4 of the rate.
    memories = [
        memoryview(map_memory(request_nbytes, "MADV_HUGEPAGE")) for _ in range(1 if one_memory else num_in_flight)
    ]
    random = os.urandom(request_nbytes)
    for memory in memories:
        memory[:] = random
    free = deque(memories * (num_in_flight // len(memories)))
    file = engine.open(path)
    share = {"read": 1.0, "write": 0.0, "mixed": read_share}[mode]
    acts = (engine.read if int((n + 1) * share) > int(n * share) else engine.write for n in itertools.count())
    offsets = range(0, nbytes - request_nbytes + 1, request_nbytes)
    work = zip(acts, itertools.cycle(offsets), strict=False)
    in_flight: deque[tuple[IOTransfer, memoryview]] = deque()
    num_done = 0
    begun_s = time.perf_counter()
    try:
        while True:
            while free and time.perf_counter() - begun_s < seconds:
                (act, offset), memory = next(work), free.popleft()
                in_flight.append((act(file, offset, memory), memory))
            if not in_flight:
                return num_done * request_nbytes / (time.perf_counter() - begun_s)
            transfer, memory = in_flight.popleft()
            transfer.wait()
            free.append(memory)
            num_done += 1
    finally:
        file.close()
