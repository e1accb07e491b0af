"""Name the phase of an engine's call, and admit one thread at a time to the engine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import CodeType, FrameType
from typing import final

import torch

from tiered_zero.errors import ModelError
from tiered_zero.system.process import OwnProcess


class Phase(Enum):
    """IDLE: between calls; weights may be read through `gathered` and `state_dict`. FORWARD, BACKWARD: of the engine.
    DROP: gradients of the step are being dropped. STEP: until its update begins. UPDATE: until the step is complete.

    A call enters its phase as it begins, and leaves it as the last thing that it does; if it raises, on its way out
    (`Entrance.call`).
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

    `TrainStep` sets `now`, `step_follows`: whether the backward that runs is of a micro-batch that ends its step, and
    `records`: whether autograd records the outermost forward, inside which reentrant checkpoints stop that for a while.
    `Entrance` sets `has_own_backward`, and `task`: autograd's number of the backward that was admitted last. Driver
    thread, or autograd's while the driver waits in backward.
    """

    def __init__(self) -> None:
        self.now = Phase.IDLE
        self.has_own_backward = False
        self.step_follows = False
        self.records = True
        self.task: int | None = None

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
        self._lock = threading.RLock()
        """Of the three below. Reentrant: a signal's handler may run inside."""
        self._inside: threading.Thread | None = None
        self._depth = 0
        self._in_backward: threading.Thread | None = None
        """The thread that runs a backward past the engine, or did when an exception ended it."""
        self.was_broken_off = False
        """Whether a KeyboardInterrupt or SystemExit has ended a call, perhaps between any two lines, since the last
        abort. [Note: Interrupted calls]"""
        self.process = OwnProcess()

    @contextmanager
    def entered(self, call: str) -> Iterator[None]:
        """Hold the engine until the block ends. `call`: what the user called, for the error."""
        self.enter(call)
        try:
            yield
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            self.was_broken_off = True
            raise
        finally:
            self.leave()

    def enter(self, call: str) -> None:
        """Raises ModelError while another thread is inside, and in a forked child. Pairs with `leave`."""
        self.process.check()
        thread = threading.current_thread()
        with self._lock:
            is_free = self._inside in (None, thread) and self._in_backward is None
            if not is_free and (other := self.other()) is not None:
                raise _refusal(call, other)
            if self._inside is None:
                self._inside = thread
            if self._inside is thread:  # else this thread works for it
                self._depth += 1

    def leave(self) -> None:
        if self._inside is threading.current_thread():  # which alone counts
            self._depth -= 1
            if not self._depth:
                self._inside = None

    def begin_backward(self) -> None:
        """Hold the engine for the backward that runs past it, until `end_backward` or the end of that backward. Raises
        ModelError while a thread is inside that it does not run for."""
        with self._lock:
            self.check(BACKWARD)
            self._in_backward = _thread_in_backward()

    def end_backward(self) -> None:
        self._in_backward = None

    def check(self, call: str) -> None:
        """Raises ModelError while another thread is inside."""
        if self._inside is not threading.current_thread() and (other := self.other()) is not None:
            raise _refusal(call, other)

    def other(self) -> threading.Thread | None:
        """Return the other thread that is inside, which this one does not work for. One that ended inside, by an
        exception that nothing could see, is let go."""
        thread = threading.current_thread()
        with self._lock:
            inside = self._inside
            if inside is not None and inside is not thread:
                if not inside.is_alive():
                    self._inside, self._depth = None, 0
                elif not _works_for(inside):
                    return inside
            inside = self._in_backward
            if inside is None or inside is thread or not _waits_in_backward(inside) or _works_for(inside):
                return None
            return inside


def find_call(code: CodeType) -> FrameType | None:
    """Find the innermost call of `code` on the caller's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def is_running(call: FrameType | None) -> bool:
    """Whether `call` is on the caller's stack: torch calls no hook if an interrupt ends it."""
    frame = sys._getframe(1) if call is not None else None
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


BACKWARD = "A backward"


def _refusal(call: str, inside: threading.Thread) -> ModelError:
    return ModelError(
        f"{call} is called from thread {threading.current_thread().name!r} while thread {inside.name!r} uses the same "
        "engine. An engine pages its parameters for one thread at a time: call it from one thread, or put a lock "
        "around every use of the engine and its module."
    )


def _works_for(inside: threading.Thread) -> bool:
    """Whether this thread is one of autograd's, in a backward, and `inside` waits for one."""
    return torch._C._current_graph_task_id() != -1 and _is_autograds() and _waits_in_backward(inside)


def _is_autograds() -> bool:
    """Whether this thread was made in C++, as autograd's are: of a device, or for checkpoints inside of each other."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _thread_in_backward() -> threading.Thread | None:
    """The thread that called the backward that runs; None if this is one of autograd's, and several may have."""
    if not _is_autograds():
        return threading.current_thread()
    waiting = [thread for thread in threading.enumerate() if _waits_in_backward(thread)]
    return waiting[0] if len(waiting) == 1 else None


def _waits_in_backward(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame is not None
