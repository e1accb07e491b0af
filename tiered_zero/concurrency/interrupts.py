"""Defer Ctrl-C while a call of ours runs, and raise it at safe points.

[Note: Interrupted calls]
After trio's protection from KeyboardInterrupt. The handler of SIGINT walks the main thread's stack to the innermost
function that is marked here. In a protected one, or one of its callees, it notes the signal; in an open one (the
forward of the user's module, autograd), or outside of all, it raises KeyboardInterrupt at once. What was noted is
raised at a safe point: where the outermost protected function ends, also if open code is around it (so between a
module's hooks), and in a blocked wait (`check`), except inside of a shielded function: one that changes what no abort
undoes, such as the update, or that is the abort itself. So code of ours is interrupted where its state is consistent,
and what runs then is the abort of any exception: it drops the step (`StepRecovery`).

A second SIGINT before the first was raised, or before the call that it was raised in has ended, raises at once. So may
a handler that the program has installed, which is left alone, and any other thread that throws an exception. Nothing is
known of the state after that: every engine of the process latches (`num_broken`), and is resumed from its last save.

The stack says what is protected, and no counter that an exception could leave wrong; a hook pays for one look at
`pending` as it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial, wraps
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar, final
from weakref import WeakSet

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

POLL_S = 0.05
"""A blocked wait of the main thread looks for an interrupt this often."""

STOPPED_S = 5.0
"""A blocked wait that looks so late was stopped with its process (Ctrl-Z, a machine that slept): no limit counts it."""


class _Mark(Enum):
    """The effect of a function on a signal that comes inside it. SAFE_POINT: it raises the deferred interrupt."""

    PROTECTED = "protected"
    SHIELDED = "shielded"
    OPEN = "open"
    SAFE_POINT = "safe point"


@final
class _Pending:
    """An interrupt whose call has not ended. `error`: to be raised; None once it was."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@final
class Interrupts:
    """The interrupts of this process. One object, `INTERRUPTS`; main thread, except where noted."""

    def __init__(self) -> None:
        self.pending: _Pending | None = None
        self.num_broken = 0
        """Calls of ours so far that an exception has ended elsewhere than at a safe point. Any thread."""
        self._engines: WeakSet[Any] = WeakSet()
        self._pid = os.getpid()

    # -- the handler -----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Handle SIGINT, if Python's own handler does; a program's handler stays. Called as a call begins: notebooks
        set Python's handler anew for each cell. Any thread; only the main thread installs."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_main_thread():
            self._pid = os.getpid()
            signal.signal(signal.SIGINT, self._handle)

    def uninstall(self) -> None:
        """Put Python's handler back, unless an engine is open."""
        is_ours = signal.getsignal(signal.SIGINT) == self._handle
        if is_ours and not self._engines and _is_main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def keep(self, engine: object) -> None:
        """Keep the handler until `drop`, or until `engine`, anything that lives as long as one, is garbage."""
        self._engines.add(engine)

    def drop(self, engine: object) -> None:
        self._engines.discard(engine)
        self.uninstall()

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        self.raise_when_safe(KeyboardInterrupt(), frame)

    def raise_when_safe(self, error: BaseException, frame: FrameType | None) -> None:
        """Raise `error` at the next safe point of the call that `frame` belongs to; at once where there is no such call
        or an earlier interrupt of it was not raised, or has not ended it. Called by handlers of signals."""
        pending = self.pending
        if os.getpid() != self._pid or _innermost_mark(frame) in (None, _Mark.OPEN):
            if pending is not None and pending.error is not None:
                self.pending = None  # its call has ended
            raise error
        if pending is None:
            self.pending = _Pending(error)
            return
        pending.error = None
        self.num_broken += 1
        raise error

    # -- safe points -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what is pending, unless the caller is shielded. Called in blocked waits. Any thread."""
        pending = self.pending
        if pending is None or pending.error is None or not _is_main_thread():
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            mark = _MARKS.get(id(frame.f_code))
            if mark is _Mark.SHIELDED:
                return
            if mark is _Mark.OPEN:
                break
            frame = frame.f_back
        error, pending.error = pending.error, None
        raise error

    def leave(self) -> None:
        """Raise what is pending if no protected call is around the one that ends now. Called at the end of a protected
        function, by its own frame, where something is pending. Any thread."""
        pending = self.pending
        if pending is None or not _is_main_thread():
            return
        mark = _innermost_mark(sys._getframe(2))
        if mark in (_Mark.PROTECTED, _Mark.SHIELDED):
            return
        error, pending.error = pending.error, None
        if mark is None:
            self.pending = None
        if error is not None:
            raise error

    def note(self, error: BaseException) -> None:
        """Count a call as broken if `error`, which leaves it, is an interrupt that was raised elsewhere than in open
        code or at a safe point. Any thread."""
        if isinstance(error, (Exception, GeneratorExit)):
            return
        found, at = None, error.__traceback__
        while at is not None:
            found = _MARKS.get(id(at.tb_frame.f_code), found)
            at = at.tb_next
        if found not in (_Mark.OPEN, _Mark.SAFE_POINT):
            self.num_broken += 1


INTERRUPTS = Interrupts()

_MARKS: dict[int, _Mark] = {}
"""id of a function's code -> what it is. The functions live as long as the process."""

_MARKED: list[CodeType] = []


def _mark(function: Callable[..., Any], mark: _Mark) -> None:
    _MARKED.append(function.__code__)
    _MARKS[id(function.__code__)] = mark


def _innermost_mark(frame: FrameType | None) -> _Mark | None:
    while frame is not None:
        if (mark := _MARKS.get(id(frame.f_code))) is not None:
            return mark
        frame = frame.f_back
    return None


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def protected(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Defer interrupts to the end of `function`, or to a wait in it. For what user code or torch calls."""
    return _guarded(function, _Mark.PROTECTED)


def shielded(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """As `protected`, and defer interrupts past the waits in `function` too: it is not to be broken off."""
    return _guarded(function, _Mark.SHIELDED)


def protected_in_context(
    conditions: Sequence[Callable[[], Any]], context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return `protected`, which also runs the function inside of `context()` while any of `conditions` is true."""
    return partial(_guarded, mark=_Mark.PROTECTED, conditions=tuple(conditions), context=context)


def _guarded(
    function: Callable[_Arguments, _Result],
    mark: _Mark,
    conditions: tuple[Callable[[], Any], ...] = (),
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[_Arguments, _Result]:
    """Make the one frame that defers interrupts around calls of `function`. For functions of modules and classes, each
    once in a process: the frame has code of its own, which is kept."""

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            for condition in conditions:
                if condition():
                    with context():
                        return function(*args, **kwargs)
            return function(*args, **kwargs)
        except BaseException as error:
            INTERRUPTS.note(error)
            raise
        finally:
            if INTERRUPTS.pending is not None:
                INTERRUPTS.leave()

    guarded: Any = run
    guarded.__code__ = guarded.__code__.replace(co_name=f"{mark.value}_{function.__name__}")  # of its own, to be marked
    _mark(guarded, mark)
    return run


_Function = TypeVar("_Function", bound=Callable[..., Any])


def mark_protected(function: _Function) -> _Function:
    """Protect the body of `function`, without a frame around it: of one that calls `leave` by itself, or of a generator
    inside of a `with` statement, whose block is not protected."""
    _mark(function, _Mark.PROTECTED)
    return function


@shielded
def call_shielded(
    function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """Call user code that is not to be broken off."""
    return function(*args, **kwargs)


def call_open(function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Call user code from protected code: interrupts are raised in it at once."""
    return function(*args, **kwargs)


_mark(call_open, _Mark.OPEN)
_mark(Interrupts.check, _Mark.SAFE_POINT)
_mark(Interrupts.leave, _Mark.SAFE_POINT)


def wait_for_event(event: threading.Event) -> None:
    """Block until `event` is set; a safe point of the main thread."""
    if not _is_main_thread():
        event.wait()
        return
    while not event.wait(POLL_S):
        INTERRUPTS.check()
