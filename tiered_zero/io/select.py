"""Examine swap directories: check them, choose an I/O engine by trial, measure its rate, and divide bytes among several
directories by speed."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import secrets
import stat
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered_zero.errors import ConfigError, TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.engine import IOEngine, IOSettings, IOTransfer, errno_text
from tiered_zero.io.native import NativeEngine
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.system import map_memory

# -- a directory -------------------------------------------------------------------------------------------------------

_MOUNTS = Path("/proc/self/mountinfo")

_LOCAL = frozenset(
    "bcachefs btrfs devtmpfs erofs exfat ext2 ext3 ext4 f2fs fuseblk hfsplus jffs2 jfs msdos nilfs2 ntfs ntfs3 overlay "
    "ramfs reiserfs tmpfs ubifs udf vfat xfs zfs".split()
)
"""Types of file systems that only one machine uses at a time. On other types, locks of another machine may be
invisible."""

_WARNINGS = {
    "tmpfs": "is RAM-backed (tmpfs): what is swapped there takes host memory, and nothing is gained",
    "ramfs": "is RAM-backed (ramfs): what is swapped there takes host memory, and nothing is gained",
    "devtmpfs": "is RAM-backed (devtmpfs), and no disk: name a directory of the file system that a disk is mounted on",
    "overlay": "lies in a container's overlay: transfers pass through its lower file system; mount a volume there",
}


def is_local(fstype: str | None) -> bool:
    """Return whether only one machine at a time can use a file system of the type `fstype`; False for unknown types."""
    return fstype in _LOCAL


def preflight_directory(path: str | os.PathLike[str], key: str = "nvme_path") -> list[str]:
    """Check that a directory can hold swap files, and return warnings as text. `key`: the config key that names the
    path. Raises ConfigError, with a remedy, if the path is missing, not a directory, or not writable."""
    directory = os.fspath(path)
    try:
        status = os.stat(directory)
    except OSError as error:
        raise ConfigError(
            f"{key} {directory} cannot be used: {errno_text(error.errno or 0)}. Create it on the disk that is to "
            "be swapped to, or name another directory."
        ) from error
    if stat.S_ISBLK(status.st_mode):
        raise ConfigError(
            f"{key} {directory} is a block device. Make a file system on it, mount it, and name a directory there."
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{key} {directory} is a file, but must be a directory. Name the directory that holds it.")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key} {directory} is not writable: {errno_text(error.errno or 0)}. Give this user the right to "
            "create files there, or name another directory."
        ) from error
    return filesystem_warnings(directory, filesystem_type(directory))


def nearest_directory(path: str) -> str:
    """Return `path` if it is a directory, else the nearest existing directory above it."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def filesystem_warnings(directory: str, fstype: str | None) -> list[str]:
    """Return warnings about the file system of a directory. `fstype`: the file system's type; None if unknown."""
    text = _WARNINGS.get(fstype or "")
    if fstype is not None and not is_local(fstype):
        text = f"is on a network file system ({fstype}), or one not known to be local: expect latency, use a local disk"
        if fstype.startswith("fuse"):
            text = "is on FUSE: each transfer passes through another process"
    return [f"nvme_path {directory} {text}."] if text else []


def filesystem_type(path: str | os.PathLike[str], mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system that holds `path`, such as "ext4"; None if unknown. `mounts`: see proc(5)."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    best, fstype = "", None
    for line in lines:
        fields = line.split(" ")
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        if os.path.commonpath((point, real)) == point and len(point) >= len(best):  # of equal points the last is on top
            best, fstype = point, fields[fields.index("-", 6) + 1]
    return fstype


# -- an engine ---------------------------------------------------------------------------------------------------------

ENGINES: dict[str, Callable[..., IOEngine]] = {
    "native": NativeEngine,
    "aiofiles": AiofilesEngine,
}
"""Engines by name, best first."""

PROBE_PREFIX = ".tiered-zero-probe-"
"""The name prefix of the temporary files with which engines are tried. A killed process may leave such a file."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen engine, open; the caller closes it. `reasons`: one line for each failed trial, and one for the
    choice."""

    engine: IOEngine
    reasons: tuple[str, ...]


def select_engine(
    *directories: str | os.PathLike[str],
    prefer: str = "auto",
    settings: IOSettings | None = None,
    io_timeout_s: float = 60.0,
) -> Selection:
    """Return the best engine that works in all `directories`. `prefer`: the name of the only engine to try, or "auto".

    An engine works if it writes, syncs and reads back a temporary file. All engines are tried with O_DIRECT, and then
    with buffered access. Raises ConfigError if nothing works."""
    if prefer != "auto" and prefer not in ENGINES:
        raise ConfigError(f"there is no I/O engine {prefer!r}; use auto, {', '.join(ENGINES)}")
    names = [*ENGINES] if prefer == "auto" else [prefer]
    paths = [os.fspath(directory) for directory in directories]

    def trial(engine: IOEngine) -> None:
        for path in paths:
            _try(engine, path)

    found, tried = _first_working(names, settings or IOSettings(), io_timeout_s, trial)
    if found is None:
        raise ConfigError(f"no I/O engine works in {', '.join(paths)}: {'; '.join(tried)}")
    how = "direct" if found.direct else "buffered"
    line = (
        f"swap I/O: {found.name} engine, {how} I/O, {found.settings.num_workers} requests at once, "
        "write-and-read check passed"
    )
    return Selection(engine=found, reasons=(*tried, line))


def select_reader(*paths: str | os.PathLike[str], settings: IOSettings) -> IOEngine:
    """Return the best engine that can read the first page of all these files. Raises TransferError if no engine can."""
    failures = [TransferError("there is no I/O engine here")]

    def trial(engine: IOEngine) -> None:
        try:
            for path in paths:
                _try_to_read(engine, os.fspath(path))
        except TransferError as error:
            failures.append(error)
            raise

    found, _ = _first_working([*ENGINES], settings, 60.0, trial)
    if found is None:
        raise failures[-1]  # of buffered access: it says most about the file
    return found


def _first_working(
    names: Sequence[str], settings: IOSettings, io_timeout_s: float, trial: Callable[[IOEngine], None]
) -> tuple[IOEngine | None, list[str]]:
    """Return the first engine that passes `trial`, or None if no engine does. Also return one line of text for each
    failed trial. `names`: the engines, best first. `trial`: raises TransferError if the engine does not work."""
    working, reasons = [*names], list[str]()
    for direct in (True, False):
        for name in [*working]:
            try:
                engine = ENGINES[name](direct=direct, settings=settings, io_timeout_s=io_timeout_s)
            except ConfigError as error:
                reasons.append(f"{name} is off: {error}")
                working.remove(name)
                continue
            try:
                trial(engine)
                return engine, reasons
            except TransferError as error:
                engine.close()
                access = "O_DIRECT" if direct else "buffered access"
                reasons.append(f"{name} with {access} is off: {error}")
            except Exception:
                engine.close()
                raise
    return None, reasons


def _try_to_read(engine: IOEngine, path: str) -> None:
    """Read the first page of a file. Raises TransferError."""
    memory = memoryview(mmap.mmap(-1, PAGE_NBYTES))
    file = engine.open(path, writable=False)
    try:
        engine.read(file, 0, memory).wait()
    finally:
        file.close()


def _try(engine: IOEngine, directory: str) -> None:
    """Write a temporary file in `directory`, sync it, read it back and compare. Raises TransferError."""
    path = os.path.join(directory, f"{PROBE_PREFIX}{secrets.token_hex(8)}")
    # the file offset and the addresses are odd multiples of a page: aligned to no more than that
    at, nbytes = PAGE_NBYTES, 2 * PAGE_NBYTES
    memory = memoryview(mmap.mmap(-1, at + 2 * nbytes))[at:]
    written, back = memory[:nbytes], memory[nbytes:]
    written[:] = secrets.token_bytes(nbytes)
    file = engine.open(path, create=True)
    try:
        engine.write(file, at, written).wait()
        engine.sync(file).wait()
        engine.read(file, at, back).wait()
    finally:
        file.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
    if back != written:
        raise TransferError(f"{path}: what was read back is not what had been written")


# -- the rate of an engine ---------------------------------------------------------------------------------------------

MODES = ("read", "write", "mixed")

_SYNCED_NBYTES = 16 * MIB
_WEIGHED_NBYTES = 16 * MIB
_WEIGHED_NAME = ".weighed"
_MOST_ROUNDS, _LEAST_TRIAL_S = 3, 0.4


def fill_file(path: str, nbytes: int, seconds: float = math.inf) -> int:
    """Create a file of random bytes (mode 0600) for measuring reads. Stop at `nbytes`, rounded down to MiB, or after
    about `seconds`. Return the size of the file."""
    end_s = time.perf_counter() + seconds
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with open(fd, "wb") as file:
        for _ in range(nbytes // MIB):
            file.write(os.urandom(MIB))  # blocks that were never written would be read without the disk
            if file.tell() % _SYNCED_NBYTES == 0:
                file.flush()
                os.fsync(fd)
                if time.perf_counter() >= end_s:
                    break
        file.flush()
        os.fsync(fd)
        return file.tell()


def weigh_directories(engine: IOEngine, directories: Sequence[Path], nbytes: int) -> list[float]:
    """Measure the speed of directories with temporary files. Return each directory's share of the data, proportional to
    its speed; the shares sum to 1. All shares are equal if the fastest directory is at most 25% faster than the
    slowest. Raises TransferError, OSError."""
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
    """Measure the rates of reading, writing, and both at once, in bytes/s. All measurements together take about
    `seconds`. Overwrites the first `nbytes` of the existing file `path`. Raises TransferError."""
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
    """Measure the rate, in bytes/s, of reading or overwriting the first `nbytes` of an existing file. `mode`: "read",
    "write" or "mixed" (both).

    Keeps `num_in_flight` requests in flight for `seconds`. `one_memory`: whether all requests use the same memory.
    `read_share`: the share of reads, from 0 to 1, in the mode "mixed". Raises TransferError."""
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
