"""Processes that run functions as the ranks of a launcher would: started once, used by many cases."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.ranks import worker
from tests.support.forked import fork_context
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.process_groups import make_collectives

DEADLINE_S = 500.0
"""A case that takes longer is killed, and fails with what its ranks have written."""


def open_collectives(timeout_s: float) -> Collectives:
    """Make and open the collectives of this process's ranks."""
    ranks = make_collectives(timeout_s)
    ranks.open()
    return ranks


def open_store() -> dist.TCPStore:
    """Open a store at which the ranks of one run meet, as a launcher does."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def launcher_environment(rank: int, world_size: int, store: dist.TCPStore) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a function returned on one rank, or what it raised: the class's name, the text and the traceback."""

    value: Any = None
    error: str = ""
    text: str = ""
    traceback: str = ""


class Rank:
    """One process. It gets cases and answers them through a pipe."""

    def __init__(self) -> None:
        context = fork_context()
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._cases, theirs = context.Pipe()
        self.process = context.Process(target=worker.main, args=(theirs, self.log.name))
        self.process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def start(self, case: tuple[Any, ...]) -> None:
        self._cases.send(case)

    def answer(self) -> Outcome:
        """Blocks. A process that ends without an answer is an error of its own."""
        try:
            return Outcome(*self._cases.recv())
        except (EOFError, ConnectionError):
            self.process.join()
            text = f"exit code {self.process.exitcode}"
            return Outcome(error="ProcessEnded", text=text, traceback=self.output())

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-6000:]

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._cases.close()
        self.log.close()


class RankPool:
    """At most four processes, and a store for each case at which they meet: `run` is `torchrun` of a function."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._store: dist.TCPStore | None = None

    def outcomes(self, function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Outcome]:
        """What `function`, of a module's top level, gives on each of `world_size` ranks."""
        self._store = open_store()
        self._ranks = [rank for rank in self._ranks if rank.is_alive or rank.end()]
        while len(self._ranks) < world_size:
            self._ranks.append(Rank())
        ranks = self._ranks[:world_size]
        for number, rank in enumerate(ranks):
            environment = launcher_environment(number, world_size, self._store)
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
            text = "\n".join(f"rank {n}: {found[n]}\n{rank.output()}" for n, rank in enumerate(ranks))
            self.close()
            raise TimeoutError(f"ranks {late} of {function.__name__} have not ended in {DEADLINE_S:g} s\n{text}")
        return [outcome for outcome in found if outcome is not None]

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """What `function` returns on each rank. Raises AssertionError where one raises."""
        outcomes = self.outcomes(function, world_size, *args, **kwargs)
        failed = [f"rank {n}: {o.error}: {o.text}\n{o.traceback}" for n, o in enumerate(outcomes) if o.error]
        if failed:
            self.close()  # what the case has left in their processes is no matter of the next one
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()
        self._store = None
