"""Run as a program under LD_PRELOAD of faulty_libc.c: each case, on each engine, printed as a line of JSON.

    python fault_cases.py DIRECTORY ENGINE [direct] [buffered]

A case returns what came of its fault; its docstring says what the fault was. Anything unexpected raises.
"""

import ctypes
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from tiered_zero.errors import TransferError
from tiered_zero.io.engine import File, IOEngine, IOSettings, IOTransfer
from tiered_zero.io.select import ENGINES

LIBC = ctypes.CDLL(None)
BLOCK_NBYTES = 8192
NBYTES = 5 * BLOCK_NBYTES
CASES: dict[str, Callable[["Scene"], str]] = {}


def case(function: Callable[["Scene"], str]) -> Callable[["Scene"], str]:
    CASES[function.__name__] = function
    return function


@dataclass
class Scene:
    """A fresh engine with one file of NBYTES, written and synced before any fault is armed."""

    engine: IOEngine
    file: File
    path: Path
    data: memoryview
    into: memoryview

    def arm(self, call: str, nth: int, effect: str, argument: int) -> None:
        where = self.path.name.encode()
        LIBC.faulty_libc_set(where, call.encode(), ctypes.c_long(nth), effect.encode(), ctypes.c_long(argument))

    def disarm(self) -> None:
        self.arm("", 0, "", 0)

    def error_of(self, transfer: IOTransfer) -> str:
        """The text of the transfer's error, after a look that the engine has latched with it."""
        try:
            transfer.wait()
        except TransferError as error:
            for submit in (lambda: self.engine.read(self.file, 0, self.into), lambda: self.engine.sync(self.file)):
                try:
                    submit()
                except TransferError as again:
                    if str(again) != str(error):
                        raise
                else:
                    raise RuntimeError("the engine has not latched") from error
            return str(error)
        raise RuntimeError("no error was raised")

    def intact(self) -> str:
        self.disarm()
        self.into[:] = bytes(len(self.into))
        self.engine.read(self.file, 0, self.into).wait()
        return "intact" if self.into == self.data and self.path.read_bytes() == self.data else "damaged"


@case
def eio_on_read(scene: Scene) -> str:
    """EIO on the 3rd read"""
    scene.arm("read", 3, "fail", errno.EIO)
    return scene.error_of(scene.engine.read(scene.file, 0, scene.into))


@case
def eio_on_write(scene: Scene) -> str:
    """EIO on the 2nd write"""
    scene.arm("write", 2, "fail", errno.EIO)
    return scene.error_of(scene.engine.write(scene.file, 0, scene.data))


@case
def enospc_on_write(scene: Scene) -> str:
    """ENOSPC on a write behind our back"""
    scene.arm("write", 1, "fail", errno.ENOSPC)
    return scene.error_of(scene.engine.write(scene.file, 0, scene.data))


@case
def eio_on_sync(scene: Scene) -> str:
    """EIO on fdatasync"""
    scene.arm("sync", 1, "fail", errno.EIO)
    text = scene.error_of(scene.engine.sync(scene.file))
    return f"{text} ({LIBC.faulty_libc_count()} call)"


@case
def enospc_on_allocate(scene: Scene) -> str:
    """ENOSPC on posix_fallocate"""
    scene.arm("allocate", 1, "fail", errno.ENOSPC)
    try:
        scene.file.allocate(1 << 20)
    except TransferError as error:
        return str(error)
    return "no error"


@case
def no_fallocate(scene: Scene) -> str:
    """EOPNOTSUPP on posix_fallocate"""
    scene.arm("allocate", 1, "fail", errno.EOPNOTSUPP)
    scene.file.allocate(3 << 20)
    status = scene.path.stat()
    text = f"{status.st_size} bytes in {status.st_blocks * 512}"
    os.truncate(scene.path, NBYTES)
    return f"{text}, {scene.intact()}"


@case
def short_writes(scene: Scene) -> str:
    """short writes of every length mod 512"""
    scene.data[:] = scene.data[::-1]
    for length in range(512):
        scene.data[:8] = length.to_bytes(8, "little")
        scene.arm("write", 2, "short", length + 512 * (length % 16))
        scene.engine.write(scene.file, 0, scene.data).wait()
        if scene.intact() != "intact":
            return f"damaged by a short write of {length}"
    return "intact"


@case
def short_reads(scene: Scene) -> str:
    """short reads of every length mod 512"""
    for length in range(512):
        scene.into[:] = bytes(len(scene.into))
        scene.arm("read", 2, "short", length + 512 * (length % 16))
        scene.engine.read(scene.file, 0, scene.into).wait()
        if scene.into != scene.data:
            return f"damaged by a short read of {length}"
    return "intact"


@case
def writes_of_nothing(scene: Scene) -> str:
    """every write moves 0 bytes"""
    scene.arm("write", 0, "short", 0)
    return scene.error_of(scene.engine.write(scene.file, 0, scene.data[:BLOCK_NBYTES]))


@case
def eintr_once(scene: Scene) -> str:
    """EINTR on a read"""
    scene.arm("read", 1, "fail", errno.EINTR)
    scene.engine.read(scene.file, 0, scene.into).wait()
    return scene.intact()


@case
def eagain_once(scene: Scene) -> str:
    """EAGAIN on a write"""
    scene.arm("write", 1, "fail", errno.EAGAIN)
    scene.engine.write(scene.file, 0, scene.data).wait()
    return scene.intact()


@case
def eagain_for_ever(scene: Scene) -> str:
    """EAGAIN on every read"""
    scene.arm("read", 0, "fail", errno.EAGAIN)
    text = scene.error_of(scene.engine.read(scene.file, 0, scene.into[:BLOCK_NBYTES]))
    return f"{text} ({LIBC.faulty_libc_count()} calls)"


@case
def truncated(scene: Scene) -> str:
    """the file was truncated"""
    os.truncate(scene.path, NBYTES - 1000)
    return scene.error_of(scene.engine.read(scene.file, 0, scene.into))


@case
def urgent_read_in_a_deep_queue(scene: Scene) -> str:
    """every read takes 10 ms, and an urgent one comes behind 40 that are not"""
    scene.arm("read", 0, "stall", -1)
    plain = [scene.engine.read(scene.file, 0, memoryview(mmap(-1, NBYTES))) for _ in range(40)]
    urgent = scene.engine.read(scene.file, 0, scene.into[:BLOCK_NBYTES], urgent=True)
    scene.arm("read", 0, "stall", 10)  # those that are held up go on
    for transfer in (urgent, *plain):
        transfer.wait()
    num_later = sum(_ended_s(transfer) > _ended_s(urgent) for transfer in plain)
    is_whole = scene.into[:BLOCK_NBYTES] == scene.data[:BLOCK_NBYTES]
    return "came first" if num_later > 20 and is_whole else f"{num_later} came later"


def _ended_s(transfer: IOTransfer) -> float:
    return transfer.submitted_s + transfer.seconds


@case
def stalled(scene: Scene) -> str:
    """a read hangs where 0.3 s are allowed"""
    scene.engine.io_timeout_s = 0.3
    scene.arm("read", 1, "stall", -1)
    begun_s = time.monotonic()
    transfer = scene.engine.read(scene.file, 0, scene.into[:BLOCK_NBYTES])
    text = scene.error_of(transfer)
    if time.monotonic() - begun_s < 0.3:
        raise RuntimeError("raised too early")
    scene.file.close()
    scene.engine.close()  # does not wait for it, and leaves it what it still uses
    if transfer.done():
        raise RuntimeError("closing waited for the stalled read")
    scene.disarm()
    while scene.into[:BLOCK_NBYTES] != scene.data[:BLOCK_NBYTES]:
        time.sleep(0.01)  # the late read lands in memory that is still there
    return text


def run(directory: Path, name: str, direct: bool) -> None:
    for key, function in CASES.items():
        settings = IOSettings(block_size=BLOCK_NBYTES, queue_depth=2)
        engine = ENGINES[name](direct=direct, settings=settings, io_timeout_s=120.0)
        path = directory / f"faulty-{name}-{direct}-{key}"
        data, into = memoryview(mmap(-1, NBYTES)), memoryview(mmap(-1, NBYTES))
        data[:] = (bytes(range(251)) * (NBYTES // 251 + 1))[:NBYTES]
        file = engine.open(str(path), create=True)
        engine.write(file, 0, data).wait()
        engine.sync(file).wait()
        scene = Scene(engine, file, path, data, into)
        came = function(scene)
        scene.disarm()
        file.close()
        engine.close()
        path.unlink()
        row = {"engine": name, "access": "direct" if direct else "buffered", "case": key, "fault": function.__doc__}
        print(json.dumps({**row, "came": came}), flush=True)


if __name__ == "__main__":
    for access in sys.argv[3:]:
        run(Path(sys.argv[1]), sys.argv[2], access == "direct")
