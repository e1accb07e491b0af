"""Two ranks, each a process whose CUDA is the lagging device; rank r is to use device r of its own two."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.lagging.child import DEADLINE_S, Child, Outcome, as_test
from tests.ranks.pool import launcher_environment, open_store

NUM_RANKS = 2
GRACE_S = 30.0
"""Once a rank has failed the others, which wait for it, have so long."""


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function `body(device, ...)`, which runs on each rank; pytest gives its other arguments. What a
    launcher puts into the environment is there, and device 0 is current."""
    return as_test(body, "lagging_ranks")


class LaggingRanks:
    """The processes, started at the first use and after a crash."""

    def __init__(self, library: Path) -> None:
        self._children = [Child(library) for _ in range(NUM_RANKS)]

    def run(self, body: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Return what `body(device, **arguments)`, of a module's top level, returns on each rank; fail where one
        raises."""
        outcomes = self.outcomes(body, **arguments)
        failed = [f"rank {n}: {o.error}\n{o.traceback}" for n, o in enumerate(outcomes) if o.error]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, body: Callable[..., Any], **arguments: Any) -> list[Outcome]:
        store = open_store()
        for rank, child in enumerate(self._children):
            child.start(body, launcher_environment(rank, NUM_RANKS, store), **arguments)
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(found) < NUM_RANKS:
            waiting = {child.pipe: rank for rank, child in enumerate(self._children) if rank not in found}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for rank in [waiting[pipe] for pipe in ready] or waiting.values():
                found[rank] = self._children[rank].answer(0)
                if found[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [found[rank] for rank in range(NUM_RANKS)]

    def close(self) -> None:
        for child in self._children:
            child.close()
