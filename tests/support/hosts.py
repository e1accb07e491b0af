"""Hosts of one machine: a disk of each has the same path as those of the others, and no other is there."""

from __future__ import annotations

import ctypes
import os
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18


def enter_host(directory: Path, own: Mapping[str, str], names: Sequence[str]) -> list[Path]:
    """Make this process, which has one thread, one of a host. `own`: names in `directory` that all hosts have -> the
    name of what it is on this host; all are made. Returns where each of `names` is: at that name, in a mount
    namespace; where this user may not make one, at the name of the host's own, so that paths differ by host."""
    for name in (*own, *own.values()):
        (directory / name).mkdir(mode=0o700, exist_ok=True)
    if not _unshare_mounts():
        return [directory / own.get(name, name) for name in names]
    for name, there in own.items():
        _mount(os.fsencode(directory / there), os.fsencode(directory / name), MS_BIND)
    return [directory / name for name in names]


def free_port() -> int:
    """Find a free TCP port that no connection is given before a server takes it: below those that the kernel gives."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, max(first_given, 11_000))
    for port in random.SystemRandom().sample(ports, 1000):
        with socket.socket() as found, suppress(OSError):
            found.bind(("", port))
            return port
    raise AssertionError(f"1000 ports from 10000 to {ports.stop} are taken (net.ipv4.ip_local_port_range)")


def _unshare_mounts() -> bool:
    """Whether this process has mounts of its own from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS) != 0:
        if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    try:
        _mount(None, b"/", MS_REC | MS_PRIVATE)
    except OSError:
        return False
    return True


def _mount(source: bytes | None, target: bytes, flags: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source, target, None, ctypes.c_ulong(flags), None) != 0:
        raise OSError(ctypes.get_errno(), "mount", os.fsdecode(target))
