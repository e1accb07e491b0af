"""The process that made an object: a forked child inherits its memory, and neither its threads nor its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from tiered_zero.errors import ModelError, TieredZeroError

_forks: list[None] = []
"""As many as lie between the process that imported this module and this one."""

os.register_at_fork(after_in_child=lambda: _forks.append(None))


@final
class OwnProcess:
    """Remembers the process in which it is made. Any thread; takes no lock, which a fork may have left taken.

    `what`: "engine", for the text of `error`.
    """

    def __init__(self, what: str = "engine", error: type[TieredZeroError] = ModelError) -> None:
        self._what, self._error = what, error
        self._pid, self._num_forks = os.getpid(), len(_forks)

    def is_current(self) -> bool:
        return len(_forks) == self._num_forks

    def check(self) -> None:
        """Raises `error` in a forked child."""
        if len(_forks) != self._num_forks:
            raise self._error(
                f"This {self._what} belongs to process {self._pid}; found a call in process {os.getpid()}, which was "
                f"forked from it and has none of its threads. Use the {self._what} in the parent alone, or make "
                "another one in the child."
            )


def boot_id() -> str:
    """Return the boot id of the running kernel; empty if there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
