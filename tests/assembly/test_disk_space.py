"""Ranks that fit on a disk one by one, and not together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.ranks.pool import RankPool, open_collectives
from tiered_zero.assembly.open_machine import check_disk_space
from tiered_zero.errors import StoreError
from tiered_zero.hardware.ranks.collectives import SingleRank


def check(path: str, share: float) -> str:
    """Every rank needs `share` of what is free at `path`, in two directories of it."""
    ranks = open_collectives(60.0)
    status = os.statvfs(path)
    needs = {(path,): int(share * status.f_bavail * status.f_frsize / 2), (path, f"{path}/other"): 0}
    (Path(path) / "other").mkdir(exist_ok=True)
    needs[path, f"{path}/other"] = needs[path,]
    try:
        check_disk_space(needs, ranks)
    except StoreError as error:
        return str(error)
    finally:
        ranks.close()
    return ""


def test_ranks_are_refused_together_with_the_need_of_each(ranks: RankPool, swap_path: Path) -> None:
    first, second = ranks.run(check, 2, str(swap_path), 0.6)
    assert first == second
    assert (
        first.startswith("The swap files of 2 ranks need ") and " together (rank 0 " in first and ", rank 1 " in first
    )
    assert f"free at {swap_path.resolve()}" in first
    assert ranks.run(check, 2, str(swap_path), 0.3) == ["", ""]


class Others:
    """Rank 0 of two; the other needs `theirs`."""

    rank, world_size = 0, 2

    def __init__(self, theirs: list[dict[str, object]]) -> None:
        self._theirs = theirs

    def exchange(self, data: bytes, what: str = "") -> list[bytes]:
        return [data, json.dumps(self._theirs).encode()]


def test_another_host_or_another_disk_does_not_count(swap_path: Path) -> None:
    needs = {(str(swap_path),): 4096}
    huge = {"host": "another", "nbytes": 1 << 60, "drives": [1], "free": 1 << 61, "path": "/mnt"}
    check_disk_space(needs, Others([huge]))  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"of 1 ranks need 1\.00 EiB|of 1 ranks need"):
        check_disk_space(needs, Others([{**huge, "free": 4096}]))  # type: ignore[arg-type]


def test_one_rank_asks_nobody(swap_path: Path) -> None:
    check_disk_space({(str(swap_path / "missing"),): 1 << 60}, SingleRank())
