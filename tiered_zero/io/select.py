"""The choice of an engine, by trying each in the real directory."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict

from tiered_zero.errors import ConfigError, TransferError
from tiered_zero.io.aiofile import AiofilesEngine
from tiered_zero.io.disk_engine import DiskEngine
from tiered_zero.io.engine import IOEngine, IOSettings
from tiered_zero.io.native import NativeEngine
from tiered_zero.io.ring_choice import compare_rates, known_rates
from tiered_zero.io.threads import ThreadsEngine
from tiered_zero.sizes import PAGE_NBYTES

ENGINES: dict[str, Callable[..., DiskEngine]] = {
    "native": NativeEngine,
    "threads": ThreadsEngine,
    "aiofiles": AiofilesEngine,
}
"""Best first."""

BUILDERS: dict[str, Callable[..., DiskEngine]] = {**ENGINES, "io_uring": partial(NativeEngine, io_uring=True)}
"""Every way to move bytes: the engines, of which the native one is with threads, and the native one with io_uring."""

_ACCESS = ((True, 512), (True, PAGE_NBYTES), (False, 1))
"""(O_DIRECT?, alignment) in the order in which they are tried."""


@dataclass(frozen=True)
class Selection:
    """`engine`: open, to be closed by whoever asked for it. `alignment`: what its O_DIRECT needs; 1 if buffered.

    `reasons`: one line for each better engine or access that is off, and the last for the one that was taken.
    `io_uring`: of the native engine, whether it is "on" or "off", and why; it is among the reasons too.
    """

    engine: IOEngine
    alignment: int
    direct: bool
    reasons: tuple[str, ...]
    io_uring: str = ""


class EngineConfig(TypedDict):
    io_engine: str
    io_uring: bool


def config_of(name: str) -> EngineConfig:
    """What the section `tiered_zero` of a config says to get one of BUILDERS."""
    return {"io_engine": "native" if name == "io_uring" else name, "io_uring": name == "io_uring"}


def select_engine(
    *directories: str | os.PathLike[str],
    prefer: str = "auto",
    settings: IOSettings | None = None,
    io_timeout_s: float = 60.0,
    io_uring: Literal["auto"] | bool = "auto",
) -> Selection:
    """The best engine that works in every one of `directories`; `prefer` names one ("native", "threads", "aiofiles")
    and no other.

    Works means: a temporary file there (mode 0600, removed) takes an aligned write and a sync, and gives the same
    bytes back; O_DIRECT at 512, then 4096, else buffered (where pages are dropped from the cache once written).
    Any engine with O_DIRECT comes before any without. Raises ConfigError where nothing works.

    `io_uring`: for the native engine and no other. "auto" takes it with O_DIRECT where it works too and is timed to be
    at least as fast as threads; True takes it or raises.
    """
    if prefer != "auto" and prefer not in ENGINES:
        raise ConfigError(f"there is no I/O engine {prefer!r}; use auto, {', '.join(ENGINES)}")
    if io_uring is True and prefer not in ("auto", "native"):
        raise ConfigError(f"tiered_zero.io_uring is of the engine native, not of {prefer}; leave out one of the two")
    settings = settings or IOSettings()
    names = [*ENGINES] if prefer == "auto" and io_uring is not True else ["native" if prefer == "auto" else prefer]
    paths = [os.fspath(directory) for directory in directories]
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
                _try_all(engine, paths)
            except TransferError as error:
                engine.close()
                reasons.append(f"{name} with {access} is off: {error}")
                continue
            about_ring = ""
            if isinstance(engine, NativeEngine):
                engine, about_ring = _with_ring(engine, paths, io_uring)
            how = f"direct I/O ({alignment}-byte aligned)" if direct else "buffered I/O"
            if about_ring.startswith("on") or io_uring is True:
                reasons.append(f"io_uring is {about_ring}")
            reasons.append(f"swap I/O: {name} engine, {how}, write-and-read check passed")
            return Selection(engine, alignment, direct, tuple(reasons), about_ring)
    raise ConfigError(f"no I/O engine works in {', '.join(paths)}: " + "; ".join(reasons))


def _with_ring(
    threads: NativeEngine, directories: Sequence[str], wanted: Literal["auto"] | bool
) -> tuple[NativeEngine, str]:
    """The engine to be used, the other closed, and "on: why" or "off: why". Raises ConfigError."""
    if wanted is False:
        return threads, "off: tiered_zero.io_uring is false"
    if wanted == "auto":
        if not threads.direct:
            return threads, "off: without O_DIRECT the kernel would serve it by threads of its own"
        known = [known_rates(directory, threads.settings) for directory in directories]
        for rates in known:
            if rates and not rates.ring_wins:
                return threads, f"off: {rates}"
    try:
        ring = _open_ring(threads, directories)
    except (ConfigError, TransferError) as error:
        if wanted is True:
            threads.close()
            raise ConfigError(f"tiered_zero.io_uring is true, but {error}. Leave it at auto.") from error
        return threads, f"off: {error}"
    if wanted is True:
        threads.close()
        return ring, "on: tiered_zero.io_uring is true"
    measured = [compare_rates(directory, ring) for directory in directories]
    decisive = min(measured, key=lambda rates: (rates.ring_wins, rates.ring - rates.threads))
    if decisive.ring_wins:
        threads.close()
        return ring, f"on: {decisive}"
    ring.close()
    return threads, f"off: {decisive}"


def _open_ring(like: NativeEngine, directories: Sequence[str]) -> NativeEngine:
    """Raises ConfigError, TransferError."""
    ring = like.another(io_uring=True)
    try:
        _try_all(ring, directories)
    except TransferError:
        ring.close()
        raise
    return ring


def _try_all(engine: DiskEngine, directories: Sequence[str]) -> None:
    """Raises TransferError."""
    for directory in directories:
        _try(engine, directory, 2 * max(engine.alignment, 512))


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
