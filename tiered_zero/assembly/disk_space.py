"""The disk space that the ranks of a run need together, before any of them allocates it."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tiered_zero.errors import StoreError
from tiered_zero.sizes import format_nbytes
from tiered_zero.system.process import boot_id


class Ranks(Protocol):
    """What is asked of the ranks of a run, or of a process group."""

    @property
    def world_size(self) -> int: ...

    def exchange(self, data: bytes, what: str = ...) -> list[bytes]:
        """Return every rank's `data`, in rank order."""


Needs = Mapping[tuple[str, ...], int]
"""Directories that are striped together -> bytes of one rank there."""


def check_disk_space(needs: Needs, ranks: Ranks) -> None:
    """Raise StoreError on every rank where those of one host need more than a file system has free.

    Each rank preallocates its own files: one alone would find room that all together do not have. What is striped over
    several drives counts on all of them together, for its shares are measured later. Collective.
    """
    if ranks.world_size == 1:
        return
    own = [{"host": boot_id(), "nbytes": nbytes, **_drives(paths)} for paths, nbytes in needs.items() if nbytes]
    found = [json.loads(message) for message in ranks.exchange(json.dumps(own).encode(), "disk space")]
    sums: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    free: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    for rank, each in enumerate(found):
        for need in each:
            drives = need["host"], tuple(need["drives"])
            sums[drives][rank] = sums[drives].get(rank, 0) + need["nbytes"]
            free.setdefault(drives, (need["free"], need["path"]))
    for drives, by_rank in sums.items():
        nbytes, path = free[drives]
        if (needed := sum(by_rank.values())) > nbytes:
            each = ", ".join(f"rank {rank} {format_nbytes(own)}" for rank, own in sorted(by_rank.items()))
            raise StoreError(
                f"The swap files of {len(by_rank)} ranks need {format_nbytes(needed)} together ({each}); "
                f"{format_nbytes(nbytes)} free at {path}. Free space (`tiered-zero swap gc {path}` removes what killed "
                "runs have left), name another nvme_path, or put less on NVMe."
            )


def _drives(paths: Sequence[str]) -> dict[str, object]:
    """The file systems that hold `paths`, and what they have free together."""
    by_device = {os.stat(path).st_dev: path for path in reversed(paths)}
    status = [os.statvfs(path) for path in by_device.values()]
    free = sum(each.f_bavail * each.f_frsize for each in status)
    return {"drives": sorted(by_device), "free": free, "path": str(Path(paths[0]).resolve())}
