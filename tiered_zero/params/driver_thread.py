"""One thread at a time uses an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from tiered_zero.errors import ModelError
from tiered_zero.hardware.process import OwnProcess


@final
class DriverThread:
    """Admits one thread at a time to an engine and its model; refuses a second one while the first is inside.

    One thread after another is fine. Autograd's own threads work for the thread that waits in backward.
    """

    def __init__(self) -> None:
        self._inside: dict[str, int] = {}  # "ident": of the thread inside; setdefault() claims it atomically
        self._depth = 0
        self._process = OwnProcess()

    @contextmanager
    def entered(self, call: str) -> Iterator[None]:
        """Hold the engine until the block ends. `call`: what the user called, for the error."""
        self.enter(call)
        try:
            yield
        finally:
            self.leave()

    def enter(self, call: str) -> None:
        """Raises ModelError while another thread is inside, and in a forked child. Pairs with `leave`."""
        self.check(call)
        if self._inside.setdefault("ident", threading.current_thread().ident or 0) == threading.get_ident():
            self._depth += 1
        elif not _works_for_autograd():
            self._refuse(call)

    def leave(self) -> None:
        if self._depth and self._inside.get("ident") == threading.get_ident():
            self._depth -= 1
            if not self._depth:
                self._inside.clear()

    def check(self, call: str) -> None:
        """Raises ModelError while another thread is inside, and in a forked child."""
        self._process.check()
        if self.is_other():
            self._refuse(call)

    def is_other(self) -> bool:
        """Whether another thread is inside, which this one does not work for."""
        inside = self._inside.get("ident")
        if inside is None or inside == threading.get_ident() or _works_for_autograd():
            return False
        if any(thread.ident == inside for thread in threading.enumerate()):
            return True
        self._depth = 0  # it ended inside, by an exception that nothing could see
        self._inside.clear()
        return False

    def _refuse(self, call: str) -> None:
        inside = self._inside.get("ident")
        names = [thread.name for thread in threading.enumerate() if thread.ident == inside]
        raise ModelError(
            f"{call} is called from thread {threading.current_thread().name!r} while thread "
            f"{names[0] if names else inside!r} uses the same engine. An engine pages its parameters for one thread at "
            "a time: call it from one thread, or put a lock around every use of the engine and its module."
        )


def _works_for_autograd() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
