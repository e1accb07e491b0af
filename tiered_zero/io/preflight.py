"""Check a swap directory before anything is written to it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from tiered_zero.errors import ConfigError
from tiered_zero.io.disk import errno_text

_MOUNTS = Path("/proc/self/mountinfo")

_LOCAL = frozenset(
    "bcachefs btrfs devtmpfs erofs exfat ext2 ext3 ext4 f2fs fuseblk hfsplus jffs2 jfs msdos nilfs2 ntfs ntfs3 overlay "
    "ramfs reiserfs tmpfs ubifs udf vfat xfs zfs".split()
)
"""File systems to which only one kernel writes. Any other may be shared with a machine whose locks are invisible
here."""

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
    """Check a directory for swap files, and return warnings as text. `key`: the config key that names it. Raises
    ConfigError, with a remedy, if it is missing, no directory, a block device, another user's behind a symbolic link,
    or not writable. Creates and removes one empty file. Free space is not checked here but by the store."""
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
    if os.path.islink(directory.rstrip(os.sep)) and status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{key} {directory} is a symbolic link to {os.path.realpath(directory)}, which belongs to user "
            f"{status.st_uid}, not to you. Name a directory of your own."
        )
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
    """Return `path`, or the nearest directory above it, that exists."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def filesystem_warnings(directory: str, fstype: str | None) -> list[str]:
    """Return warnings about the file system of a directory. `fstype`: None if unknown, which gives none."""
    text = _WARNINGS.get(fstype or "")
    if fstype is not None and not is_local(fstype):
        text = f"is on a network file system ({fstype}), or one not known to be local: expect latency, use a local disk"
        if fstype.startswith("fuse"):
            text = "is on FUSE: each transfer passes through another process"
    return [f"nvme_path {directory} {text}."] if text else []


def filesystem_type(path: str | os.PathLike[str], mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the mount that holds `path` ("ext4", "tmpfs", ...), as proc(5) describes; None if unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    best, fstype = "", None
    for line in lines:
        fields = line.split(" ")
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        if os.path.commonpath((point, real)) == point and len(point) >= len(best):  # of equals the last is on top
            best, fstype = point, fields[fields.index("-", 6) + 1]
    return fstype
