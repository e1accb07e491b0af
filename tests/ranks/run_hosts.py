"""Ranks on two hosts, each with a disk of its own, which commit in place and are started again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.crash.run_commits import digest, take_step
from tests.crash.run_rank_commits import end, fork, lines_of, start
from tests.support.hosts import enter_host


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of all ranks. `directory`: has what follows. `disks`: the number of the disk of each host, in the order
    of ranks: `disk{number}`, which is at `nvme` on that host (support/hosts.py). `stop`: train to this step, from what
    is in `saved`, if there is anything. `saves`: after each step, in place or as files. `has_one_save_dir`: whether the
    hosts share `saved`, else it is `saved{number}`."""

    directory: str
    disks: Sequence[int]
    stop: int
    world_size: int = 2
    stage: int = 3
    state_format: str = "fp32"
    saves: bool = True
    in_place: bool = True
    has_one_save_dir: bool = True


def run_rank(pipe: int, asked: Start) -> None:
    """Train; what it came to is written to `pipe`."""

    def say(**fields: object) -> None:
        os.write(pipe, (json.dumps(fields) + "\n").encode())

    rank, per_host = int(os.environ["RANK"]), asked.world_size // len(asked.disks)
    os.environ.update({"LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host)})
    disk = asked.disks[rank // per_host]
    own = {"nvme": f"disk{disk}"} if asked.has_one_save_dir else {"nvme": f"disk{disk}", "saved": f"saved{disk}"}
    swap_path, save_dir = enter_host(Path(asked.directory), own, ("nvme", "saved"))
    resume = {"resume": str(save_dir)} if (save_dir / "latest").exists() else {}
    engine = start(swap_path, asked.stage, asked.state_format, {"in_place": asked.in_place, **resume})
    say(first=engine.global_steps, digest=digest(engine))
    for step in range(engine.global_steps, asked.stop):
        take_step(engine, step)
        if asked.saves:
            engine.save_checkpoint(save_dir)
    say(last=engine.global_steps, digest=digest(engine))
    engine.close()


def answer(asked: Start) -> list[dict[str, Any]]:
    """Fork the ranks from this process, which has done nothing but import (support/forked.py). Returns of each rank
    the lines that it wrote, as one record: the last of each field."""
    torch.set_num_threads(1)
    children, pipes = fork(asked.world_size, partial(run_rank, asked=asked))
    statuses = end(children)
    found: list[dict[str, Any]] = []
    for pipe, status in zip(pipes, statuses, strict=True):
        found.append({"status": status})
        for line in lines_of(pipe, bytearray()):
            found[-1] |= line
    return found
