"""Small real file systems, mounted where this machine allows it; where it does not, the test says why and skips."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

IMAGE_MIB = {"ext4": 48, "xfs": 304, "btrfs": 128, "fuse": 32}
IN_MEMORY = {"tmpfs": ["-t", "tmpfs", "-o", "size=48m,mode=0700", "none"], "ramfs": ["-t", "ramfs", "none"]}
KINDS = (*IMAGE_MIB, *IN_MEMORY, "overlay")

_SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN of ext4 and xfs: from now on every request fails, as if the device were gone."""

_NO_LOG_FLUSH = ctypes.c_uint32(2)


@contextmanager
def mounted(kind: str, directory: Path) -> Iterator[Path]:
    """An empty, small file system of a kind, made in `directory`: a test that fills it fills nothing else."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip(f"a real {kind} needs root and mount; the faults injected without one still run")
    with ExitStack() as below:
        if kind == "overlay":  # as large as what lies under it
            (under := directory / "under").mkdir()
            directory = below.enter_context(mounted("ext4", under))
        command = _mount_command(kind, directory)
        (point := directory / "mounted").mkdir()
        made = subprocess.run([*command, str(point)], check=False, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"{kind} cannot be mounted here: {made.stderr.strip()}")
        try:
            os.chmod(point, 0o700)
            shutil.rmtree(point / "lost+found", ignore_errors=True)
            yield point
        finally:
            subprocess.run(["umount", "--lazy", str(point)], check=True)  # a test that failed has files open there


def _mount_command(kind: str, directory: Path) -> list[str]:
    """Make what is to be mounted; the command lacks the mount point."""
    if kind in IN_MEMORY:
        return ["mount", *IN_MEMORY[kind]]
    if kind == "overlay":
        for part in ("lower", "upper", "work"):
            (directory / part).mkdir()
        options = ",".join(f"{part}dir={directory / part}" for part in ("lower", "upper", "work"))
        return ["mount", "-t", "overlay", "-o", options, "overlay"]
    make = "mkfs.ext4" if kind == "fuse" else f"mkfs.{kind}"
    for program in [make, *(["fuse2fs"] if kind == "fuse" else [])]:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed; the faults injected without it still run")
    image = directory / "image"
    image.touch(0o600)
    os.truncate(image, IMAGE_MIB[kind] << 20)
    # pages as blocks: else so small a disk is cut into groups, and each file into several extents
    options = ["-b", "4096"] if make == "mkfs.ext4" else []
    subprocess.run([make, "-q", *options, str(image)], check=True, capture_output=True)
    # -s: fuse2fs takes one request at a time; by default it mixes up those that come at once
    return [*(["fuse2fs", "-s"] if kind == "fuse" else ["mount", "-o", "loop"]), str(image)]


def shut_down(point: Path) -> None:
    """The device is gone (ext4, xfs)."""
    fd = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, bytes(_NO_LOG_FLUSH))
    finally:
        os.close(fd)


def fill(point: Path) -> Path:
    """Take all space that is left with one file, and return it."""
    junk = point / "junk"
    with open(junk, "wb", buffering=0) as file:
        for nbytes in (1 << 20, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(nbytes)) == nbytes:
                    pass
        with suppress(OSError):
            os.fsync(file.fileno())
    return junk
