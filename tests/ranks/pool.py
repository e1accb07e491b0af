"""Processes that run functions as the ranks of a launcher would: started once, used by many cases."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tiered_zero.hardware.ranks.collectives import Collectives, make_collectives

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0
"""A case that takes longer is killed, and fails with what its ranks have written."""


def open_collectives(timeout_s: float, **settings: Any) -> Collectives:
    """Make and open the collectives of this process's ranks."""
    ranks = make_collectives(timeout_s, **settings)
    ranks.open()
    return ranks


@dataclass(frozen=True)
class Outcome:
    """What a function returned on one rank, or what it raised: the class's name, the text and the traceback."""

    value: Any = None
    error: str = ""
    text: str = ""
    traceback: str = ""


class Rank:
    """One process. It reads cases from its standard input and answers on a pipe."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "tests.ranks.worker", str(write)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, pass_fds=[write], cwd=ROOT,
            env=environment,
        )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read, "rb")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def start(self, case: tuple[Any, ...]) -> None:
        assert self.process.stdin is not None
        pickle.dump(case, self.process.stdin)
        self.process.stdin.flush()

    def answer(self) -> Outcome:
        """Blocks. A process that ends without an answer is an error of its own."""
        try:
            return Outcome(*pickle.load(self._answers))
        except EOFError:
            code = self.process.wait()
            return Outcome(error="ProcessEnded", text=f"exit code {code}", traceback=self.output())

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-6000:]

    def end(self) -> None:
        if self.is_alive:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._answers.close()
        self.log.close()


class RankPool:
    """At most four processes, and a store for each case at which they meet: `run` is `torchrun` of a function."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._store: dist.TCPStore | None = None

    def outcomes(self, function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Outcome]:
        """What `function`, of a module's top level, gives on each of `world_size` ranks."""
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._ranks = [rank for rank in self._ranks if rank.is_alive or rank.end()]
        while len(self._ranks) < world_size:
            self._ranks.append(Rank())
        ranks = self._ranks[:world_size]
        for number, rank in enumerate(ranks):
            environment = {
                "RANK": str(number), "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            rank.start((environment, function.__module__, function.__qualname__, args, kwargs))
        found: list[Outcome | None] = [None] * world_size

        def wait(number: int) -> None:
            found[number] = ranks[number].answer()

        threads = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(world_size)]
        deadline = time.monotonic() + DEADLINE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [number for number, thread in enumerate(threads) if thread.is_alive()]
        if late:
            text = "\n".join(f"rank {number}:\n{ranks[number].output()}" for number in range(world_size))
            self.close()
            raise TimeoutError(f"ranks {late} of {function.__name__} have not ended in {DEADLINE_S:g} s\n{text}")
        return [outcome for outcome in found if outcome is not None]

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """What `function` returns on each rank. Raises AssertionError where one raises."""
        outcomes = self.outcomes(function, world_size, *args, **kwargs)
        failed = [f"rank {n}: {o.error}: {o.text}\n{o.traceback}" for n, o in enumerate(outcomes) if o.error]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def process_ids(self, world_size: int) -> Sequence[int]:
        return [rank.process.pid for rank in self._ranks[:world_size]]

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()
        self._store = None
