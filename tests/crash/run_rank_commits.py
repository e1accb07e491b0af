"""Run as a program: a run of several ranks with in-place commits, of which one or all are killed at random moments.

    python run_rank_commits.py SWAP_PATH SAVE_DIR NUM_KILLS SEED WORLD_SIZE STAGE STATE_FORMAT NUM_HOSTS

Each host has its own disk, SWAP_PATH/disk{number}, and cannot see the others' (support/hosts.py). The ranks are forked
after the imports, go on from SAVE_DIR if there is a checkpoint, and commit after each step. Prints one line of JSON as
run_commits.py does, with the lines of all ranks of one start together.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tiered_zero
from tests.crash.run_commits import STEPS_PER_KILL, config, digest, read_until, take_step
from tests.support.hosts import enter_host, free_port
from tests.support.imports import freeze_imports
from tests.support.models import ParityGPT
from tests.support.tags import unfinished
from tiered_zero.errors import EngineFailedError, RankError, TieredZeroError

MOST_S = 300.0
"""In which the ranks that were not killed have ended."""


def start(swap_path: Path, stage: int, state_format: str, checkpoint: dict[str, Any]) -> tiered_zero.Engine:
    settings = config(swap_path, "auto", state_format, checkpoint)
    settings["tiered_zero"]["comm_timeout_s"] = 120
    if stage < 3:
        settings["zero_optimization"] = {
            "stage": stage,
            "offload_optimizer": settings["zero_optimization"]["offload_optimizer"],
            "sub_group_size": 5000,
        }
    torch.manual_seed(int(os.environ["RANK"]) + (100 if checkpoint.get("resume") else 0))
    return tiered_zero.initialize(model=ParityGPT(), config=settings)[0]


def run_rank(
    pipe: int,
    swap_path: Path,
    save_dir: Path,
    num_steps: int,
    stage: int,
    state_format: str,
    num_hosts: int,
    limit: int,
) -> None:
    """`limit`: after so many steps it waits to be killed; less than 0: it never saves."""

    def say(**fields: object) -> None:
        os.write(pipe, (json.dumps(fields) + "\n").encode())

    per_host = int(os.environ["WORLD_SIZE"]) // num_hosts
    host, local_rank = divmod(int(os.environ["RANK"]), per_host)
    os.environ.update({"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(per_host)})
    (nvme,) = enter_host(swap_path, {"nvme": f"disk{host}"}, ["nvme"])
    resume = {"resume": str(save_dir)} if (save_dir / "latest").exists() else {}
    engine = start(nvme, stage, state_format, {"in_place": True, **resume} if limit >= 0 else {})
    say(step=engine.global_steps, digest=digest(engine))
    first = engine.global_steps
    for step in range(first, num_steps):
        while step - first == limit:
            time.sleep(1)
        take_step(engine, step)
        if limit < 0:
            say(step=engine.global_steps, digest=digest(engine))
        else:
            engine.save_checkpoint(save_dir)
            say(durable=engine.global_steps)
    say(step=engine.global_steps, digest=digest(engine), ended=True)
    engine.close()


def fork(world_size: int, run: Callable[[int], None]) -> tuple[list[int], list[int]]:
    """Start every rank. Returns their process ids and pipes. `run`: gets the pipe to write to."""
    port = free_port()
    children, pipes = [], []
    for rank in range(world_size):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            status = 1
            try:
                run(write)
                status = 0
            except TieredZeroError as error:
                os.write(write, (json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n").encode())
                status = 2 if isinstance(error, (RankError, EngineFailedError)) else 1  # another was killed
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(write)
        children.append(child)
        pipes.append(read)
    return children, pipes


def end(children: list[int]) -> list[int]:
    """Wait for those that hear of a killed rank, and kill what has not ended. Returns the statuses."""
    statuses: dict[int, int] = {}
    deadline_s = time.monotonic() + MOST_S
    while len(statuses) < len(children):
        for child in set(children) - statuses.keys():
            if time.monotonic() > deadline_s:
                os.kill(child, signal.SIGKILL)
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                statuses[child] = status
        time.sleep(0.01)
    return [statuses[child] for child in children]


def wait_for_steps(pipe: int, text: bytearray, num_steps: int) -> float:
    """Read until the rank has made so many steps, or has ended; return the seconds of the last one with its save."""
    seen_s = [time.monotonic()]
    while len(seen_s) < num_steps + 2 and not read_until(pipe, time.monotonic() + 0.01, text):
        seen_s += [time.monotonic()] * (text.count(b"\n") + 1 - len(seen_s))
    return seen_s[-1] - seen_s[-2] if len(seen_s) > 1 else 0.0


def lines_of(pipe: int, text: bytearray) -> list[dict[str, Any]]:
    while data := os.read(pipe, 1 << 16):
        text += data
    os.close(pipe)
    return [json.loads(line) for line in text.decode().splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    swap_path, save_dir = Path(sys.argv[1]), Path(sys.argv[2])
    num_kills, seed, world_size, stage = map(int, sys.argv[3:7])
    state_format, num_hosts = sys.argv[7], int(sys.argv[8])
    num_steps = 3 + STEPS_PER_KILL * num_kills
    settings: dict[str, Any] = {"swap_path": swap_path, "save_dir": save_dir, "num_steps": num_steps}
    settings |= {"stage": stage, "state_format": state_format, "num_hosts": num_hosts}
    chance = random.Random(seed)
    torch.set_num_threads(1)
    freeze_imports()
    children, pipes = fork(world_size, partial(run_rank, **settings, limit=-1))
    texts = [bytearray() for _ in pipes]
    for pipe, text in zip(pipes, texts, strict=True):
        read_until(pipe, time.monotonic() + 300, text)
    assert end(children) == [0] * world_size, "the reference failed"
    expected = [[line["digest"] for line in lines_of(*one)][:-1] for one in zip(pipes, texts, strict=True)]
    assert all(own == expected[0] for own in expected), "weights and state are the same on all ranks"
    starts: list[dict[str, Any]] = []
    while True:
        limit = STEPS_PER_KILL if len(starts) < num_kills else num_steps
        children, pipes = fork(world_size, partial(run_rank, **settings, limit=limit))
        texts = [bytearray() for _ in pipes]
        victims = chance.choice([[0], [1], list(range(world_size))])
        in_start = chance.random() < 0.2
        ended = len(starts) >= num_kills
        if ended:
            for pipe, text in zip(pipes, texts, strict=True):
                read_until(pipe, time.monotonic() + 300, text)
        else:
            longest_s = 1.0 if in_start else wait_for_steps(pipes[0], texts[0], chance.randrange(1, STEPS_PER_KILL))
            time.sleep(chance.uniform(0, longest_s))  # it goes on: kill it in its next step, or in the save of that
            for victim in victims:
                os.kill(children[victim], signal.SIGKILL)
        statuses = end(children)
        lines = [line for one in zip(pipes, texts, strict=True) for line in lines_of(*one)]
        in_save = bool([*unfinished(save_dir), *swap_path.glob("*/*/manifest.next")])
        starts.append({"lines": lines, "ended": ended, "statuses": statuses, "in_save": in_save})
        if ended:
            break
    print(json.dumps({"expected": expected[0], "starts": starts}))


if __name__ == "__main__":
    main()
