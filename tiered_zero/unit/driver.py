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
from tiered_zero.system import OwnProcess


class Phase(Enum):
    """What the engine does now.

    * IDLE: none of the calls below runs; weights may be read through `gathered` and `state_dict`.
    * FORWARD, BACKWARD: the engine's forward or backward runs.
    * DROP: `zero_grad` drops the step's gradients or sets them to zero.
    * STEP: `step()` runs, and its update has not begun.
    * UPDATE: from the start of the update until the step is complete."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    DROP = "drop"
    STEP = "step"
    UPDATE = "update"


@final
class CallPhase:
    """The phase of the engine's call that runs now. `TrainStep` sets the fields. Used on the driver thread, or on
    autograd's threads while the driver waits in backward."""

    def __init__(self) -> None:
        self.now = Phase.IDLE
        self.has_own_backward = False
        """Whether a backward runs that the user has started outside of the engine's calls."""
        self.step_follows = False
        """Whether the engine's running (or last) backward belongs to the last micro-batch of a step."""
        self.records = True
        """Whether grad mode was on when the outermost forward began. A reentrant checkpoint turns grad mode off inside
        this forward, so `torch.is_grad_enabled()` alone is not enough."""
        self.task: int | None = None
        """The id of autograd's graph task for the last backward that the engine has noticed; None before the first."""

    @property
    def pass_name(self) -> str:
        """The pass that runs now: "forward" (a call of the engine), "backward" (also the user's own), else "idle". A
        module that the user calls directly runs in "idle"."""
        if self.has_own_backward or self.now is Phase.BACKWARD:
            return "backward"
        return "forward" if self.now is Phase.FORWARD else "idle"


@final
class DriverThread:
    """Admits one thread at a time, the driver thread, to an engine and its model. While the driver thread waits in
    backward, autograd's threads are admitted too."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Held while a thread checks and sets `_inside`, `_depth` and `_in_backward`. `leave` and `end_backward` change
        these fields without the lock. The lock is reentrant, because a signal handler may run while it is held."""
        self._inside: threading.Thread | None = None
        self._depth = 0
        self._in_backward: threading.Thread | None = None
        """The thread that has called a backward without the engine (`loss.backward()`). None if there is none, or if
        the thread is unknown. The field stays set if an exception ends that backward."""
        self.was_broken_off = False
        """Whether a KeyboardInterrupt or SystemExit has ended a call since the last abort. [Note: Interrupted calls]"""
        self.process = OwnProcess()

    @contextmanager
    def entered(self, call: str) -> Iterator[None]:
        """Admit this thread for the length of the block, as `enter` does."""
        self.enter(call)
        records = torch.is_grad_enabled()
        try:
            yield
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            self.was_broken_off = True
            torch.set_grad_enabled(records)  # a torch.no_grad() may have been broken off as it ended
            raise
        finally:
            self.leave()

    def enter(self, call: str) -> None:
        """Admit this thread until `leave`. `call`: what the user called, for the error. Raises ModelError if another
        thread is inside, and in a forked child."""
        self.process.check()
        thread = threading.current_thread()
        with self._lock:
            is_free = self._inside in (None, thread) and self._in_backward is None
            if not is_free and (other := self.other()) is not None:
                raise _refusal(call, other)
            if self._inside is None:
                self._inside = thread
            if self._inside is thread:  # else this is autograd's thread, which works for the thread inside
                self._depth += 1

    def leave(self) -> None:
        if self._inside is threading.current_thread():  # `_depth` counts only the calls of that thread
            self._depth -= 1
            if not self._depth:
                self._inside = None

    def begin_backward(self) -> None:
        """Reserve the engine for the thread that has called the running `loss.backward()`. The reservation ends at
        `end_backward`, or when that backward ends. Raises ModelError if another thread is inside the engine."""
        with self._lock:
            self.check(BACKWARD)
            self._in_backward = _thread_in_backward()

    def end_backward(self) -> None:
        self._in_backward = None

    def check(self, call: str) -> None:
        """Raise ModelError if another thread is inside the engine. `call`: what the user called, for the error."""
        if self._inside is not threading.current_thread() and (other := self.other()) is not None:
            raise _refusal(call, other)

    def other(self) -> threading.Thread | None:
        """Return the thread that keeps this thread out of the engine; None if this thread is admitted. That thread is
        in a call of the engine, or has reserved the engine. Autograd's threads are admitted if they work for that
        thread."""
        thread = threading.current_thread()
        with self._lock:
            inside = self._inside
            if inside is not None and inside is not thread:
                if not inside.is_alive():  # it has ended without `leave`
                    self._inside, self._depth = None, 0
                elif not _works_for(inside):
                    return inside
            inside = self._in_backward
            if inside is None or inside is thread or not _waits_in_backward(inside) or _works_for(inside):
                return None
            return inside


def find_call(code: CodeType) -> FrameType | None:
    """Return the Python frame of the innermost call of `code` on the caller's stack; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def is_running(call: FrameType | None) -> bool:
    """Return whether the Python frame `call` is on the caller's stack; False for None."""
    # forward hooks cannot tell: torch calls none if an interrupt ends a call
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
    """Return whether this thread belongs to autograd and runs a backward, while the thread `inside` waits for a
    backward."""
    return torch._C._current_graph_task_id() != -1 and _is_autograds() and _waits_in_backward(inside)


def _is_autograds() -> bool:
    """Return whether C++ code made this thread, and not Python. Autograd's threads are made by C++ code."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _thread_in_backward() -> threading.Thread | None:
    """Return the thread that called the running backward; None if it is not known."""
    if not _is_autograds():
        return threading.current_thread()
    waiting = [thread for thread in threading.enumerate() if _waits_in_backward(thread)]
    return waiting[0] if len(waiting) == 1 else None


def _waits_in_backward(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        frame = frame.f_back
    return frame is not None
