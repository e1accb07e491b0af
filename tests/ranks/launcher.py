"""Run as a program: torchrun's agent, with ranks that are forked after the imports (support/forked.py).

    python launcher.py SCRATCH NUM_RANKS NODE_RANK ADDRESS PORT NAMESPACE PROGRAM ARGUMENTS...

NODE_RANK, ADDRESS, PORT: of two nodes, as torchrun has them; -1: this is the only one (--standalone). NAMESPACE: the
name of the network namespace of the agent and its ranks, or "". The ranks append to stdout.txt and stderr.txt in
SCRATCH; rank{number}.pid has the id of each.
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.forked import run_program

ROOT = str(Path(__file__).resolve().parents[2])
CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """What `ip netns exec` does, for the network alone."""
    if not namespace:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns", namespace)


def close_other_ends(files: Sequence[int]) -> None:
    """Close the ends of pipes whose other end is in `files`: a process that has both does not see that pipe end."""
    pipes = {os.readlink(f"/proc/self/fd/{number}") for number in files}
    for number in {*map(int, os.listdir("/proc/self/fd"))} - {*files}:
        with suppress(OSError):  # of the list itself
            if os.readlink(f"/proc/self/fd/{number}") in pipes:
                os.close(number)


def fork_the_server() -> None:
    """Let the process that multiprocessing forks the ranks from be a fork of this one, which has one thread: started as
    a program it would import what this one has imported."""
    spawn = util.spawnv_passfds

    def fork(path: bytes, arguments: Sequence[str], files: Sequence[int]) -> int:
        code = arguments[-1]
        if "forkserver" not in code:
            return spawn(path, arguments, files)
        if pid := os.fork():
            return pid
        try:
            close_other_ends(files)
            exec(code, {})
        finally:
            os._exit(1)

    util.spawnv_passfds = fork


def run_rank(scratch: str, namespace: str, command: list[str]) -> None:
    enter(namespace)
    (Path(scratch) / f"rank{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    run_program(command, dict(os.environ), scratch, f"{scratch}/stdout.txt", f"{scratch}/stderr.txt")


def main() -> None:
    scratch, num_ranks, node_rank, address, port, namespace, *command = sys.argv[1:]
    enter(namespace)
    fork_the_server()
    sys.path.insert(0, ROOT)  # for the ranks, which have this process's
    if int(node_rank) < 0:
        place = {"max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(uuid.uuid4())}
    else:
        place = {"max_nodes": 2, "rdzv_backend": "static", "rdzv_endpoint": f"{address}:{port}", "run_id": "none"}
        place["rdzv_configs"] = {"rank": int(node_rank), "timeout": 900}
    config = LaunchConfig(
        min_nodes=place["max_nodes"],
        nproc_per_node=int(num_ranks),
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=0.1,
        **place,
    )
    elastic_launch(config, run_rank)(scratch, namespace, command)


if __name__ == "__main__":
    main()
