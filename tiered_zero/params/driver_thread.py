"""Phase and identity of the driver thread: one at a time uses an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import final

import torch

from tiered_zero.errors import ModelError
from tiered_zero.system.process import OwnProcess


class Phase(Enum):
    """IDLE: between calls; weights may be read through `gathered` and `state_dict`. FORWARD, BACKWARD: of the engine.
    DROP: gradients of the step are being dropped. STEP: until its update begins. UPDATE: until the step is complete.

    A call enters its phase as it begins, and leaves it as the last thing that it does; if it raises, on its way out
    (`StepRecovery.call`).
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    DROP = "drop"
    STEP = "step"
    UPDATE = "update"


@final
class CallPhase:
    """The phase of the engine's call, and whether autograd runs a backward that the user started past the engine.

    `TrainStep` sets `now`, and `step_follows`: whether the backward that runs is of a micro-batch that ends its step.
    `OwnBackward` sets `has_own_backward`. Driver thread, or autograd's while the driver waits in backward.
    """

    def __init__(self) -> None:
        self.now = Phase.IDLE
        self.has_own_backward = False
        self.step_follows = False

    @property
    def pass_name(self) -> str:
        """ "forward", "backward" or "idle": which pass uses parameters now."""
        if self.has_own_backward or self.now is Phase.BACKWARD:
            return "backward"
        return "forward" if self.now is Phase.FORWARD else "idle"


@final
class DriverThread:
    """Admits one thread at a time to an engine and its model; refuses a second one while the first is inside.

    One thread after another is fine. Autograd's own threads work for the thread that waits in backward.
    """

    def __init__(self) -> None:
        self._inside: dict[str, int] = {}  # "ident": of the thread inside; setdefault() claims it atomically
        self._depth = 0
        self.process = OwnProcess()

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
        self.process.check()
        ident = threading.get_ident()
        if self._inside.setdefault("ident", ident) != ident:
            self.check(call)  # which lets a thread go that ended inside
            if self._inside.setdefault("ident", ident) != ident:
                if not _works_for_autograd():
                    self._refuse(call)
                return
        self._depth += 1

    def leave(self) -> None:
        if self._depth and self._inside.get("ident") == threading.get_ident():
            self._depth -= 1
            if not self._depth:
                self._inside.clear()

    def check(self, call: str) -> None:
        """Raises ModelError while another thread is inside."""
        if self._inside.get("ident") != threading.get_ident() and self.is_other():
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
