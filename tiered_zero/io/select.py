"""The choice of an engine, by trying each in the real directory."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from tiered_zero.errors import ConfigError, TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.direct import NativeEngine
from tiered_zero.io.disk_engine import DiskEngine
from tiered_zero.io.engine import IOEngine, IOSettings
from tiered_zero.io.threads import ThreadsEngine
from tiered_zero.sizes import PAGE_NBYTES

ENGINES: dict[str, Callable[..., DiskEngine]] = {
    "native": NativeEngine,
    "threads": ThreadsEngine,
    "aiofiles": AiofilesEngine,
}
"""Best first."""

_ACCESS = ((True, 512), (True, PAGE_NBYTES), (False, 1))
"""(O_DIRECT?, alignment) in the order in which they are tried."""


@dataclass(frozen=True)
class Selection:
    """`engine`: open, to be closed by whoever asked for it. `alignment`: what its O_DIRECT needs; 1 if buffered.

    `reasons`: one line for each better engine or access that is off, and the last for the one that was taken.
    """

    engine: IOEngine
    alignment: int
    direct: bool
    reasons: tuple[str, ...]


def select_engine(
    *directories: str | os.PathLike[str],
    prefer: str = "auto",
    settings: IOSettings | None = None,
    io_timeout_s: float = 60.0,
) -> Selection:
    """The best engine that works in every one of `directories`; `prefer` names one ("native", "threads", "aiofiles")
    and no other.

    Works means: a temporary file there (mode 0600, removed) takes an aligned write and a sync, and gives the same
    bytes back; O_DIRECT at 512, then 4096, else buffered (where pages are dropped from the cache once written).
    Any engine with O_DIRECT comes before any without. Raises ConfigError where nothing works.
    """
    if prefer != "auto" and prefer not in ENGINES:
        raise ConfigError(f"there is no I/O engine {prefer!r}; use auto, {', '.join(ENGINES)}")
    settings = settings or IOSettings()
    names = [*ENGINES] if prefer == "auto" else [prefer]
    reasons: list[str] = []
    for direct, alignment in _ACCESS:
        access = f"O_DIRECT at {alignment}" if direct else "buffered access"
        for name in [*names]:
            try:
                engine = ENGINES[name](direct=direct, alignment=alignment, settings=settings, io_timeout_s=io_timeout_s)
            except ConfigError as error:
                reasons.append(f"{name} is off: {error}")
                names.remove(name)
                continue
            try:
                for directory in directories:
                    _try(engine, os.fspath(directory), 2 * max(alignment, 512))
            except TransferError as error:
                engine.close()
                reasons.append(f"{name} with {access} is off: {error}")
                continue
            reasons.append(f"{name} with {access} is used: a write there was read back intact")
            return Selection(engine, alignment, direct, tuple(reasons))
    names = [os.fspath(directory) for directory in directories]
    raise ConfigError(f"no I/O engine works in {', '.join(names)}: " + "; ".join(reasons))


def _try(engine: DiskEngine, directory: str, nbytes: int) -> None:
    """Write, sync, read back and compare at an offset of half of `nbytes`; raises TransferError."""
    path = os.path.join(directory, f".tiered-zero-probe-{secrets.token_hex(8)}")
    half = nbytes // 2
    if engine.direct and not hasattr(os, "O_DIRECT"):
        raise TransferError("this platform has no O_DIRECT")
    memory = memoryview(mmap.mmap(-1, 2 * nbytes + 2 * PAGE_NBYTES))
    written, back = memory[half : half + nbytes], memory[half + nbytes : half + 2 * nbytes]
    written[:] = secrets.token_bytes(nbytes)
    file = engine.open(path, create=True)
    try:
        engine.write(file, half, written).wait()
        engine.sync(file).wait()
        engine.read(file, half, back).wait()
    finally:
        file.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
    if back != written:
        raise TransferError(f"{path}: what was read back is not what had been written")
