"""Defer Ctrl-C during work that cannot be undone, and call the closing functions of a run in order.

[Note: Interrupted calls] Python's own handler of SIGINT raises KeyboardInterrupt on the main thread, between any two
lines of code, also in this package. The interrupted call then drops its step (`TrainStep.abort`). Some work cannot be
dropped: `step()`, a backward whose updates have begun, a load that replaces values, the write of a change under
`gathered(modify=True)`, an in-place commit, `close()`. A KeyboardInterrupt during such work is raised when the work has
ended. A second KeyboardInterrupt is raised immediately. So is an exception that the program's own handler of SIGINT
raises. If such an exception ends the work, the engine latches (refuses later calls). If a handler raises while a lane's
job runs on the main thread, the exception becomes the job's error."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final


class _Held:
    """The handler of SIGINT during a block of `hold_interrupts`. It notes the first signal in `has_come`, and raises
    KeyboardInterrupt at the second. After the block (`is_over`) it raises at every signal."""

    has_come = False
    is_over = False  # a block that ends on another thread cannot remove this handler

    def __call__(self, *_: object) -> None:
        if self.has_come or self.is_over:
            raise KeyboardInterrupt
        self.has_come = True


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Return a context manager (or decorator) that defers Ctrl-C. The first Ctrl-C inside the block raises
    KeyboardInterrupt when the block ends; a second one raises it immediately.

    The context manager does nothing on a thread other than the main thread, inside another `hold_interrupts` block, or
    if the program has its own handler of SIGINT."""
    main, before = threading.main_thread().ident, signal.getsignal(signal.SIGINT)
    is_free = before is signal.default_int_handler or (isinstance(before, _Held) and before.is_over)
    if threading.get_ident() != main or not is_free:
        yield
        return
    held = _Held()
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        held.is_over = True
        if threading.get_ident() == main:  # else another thread collects an abandoned block
            if signal.getsignal(signal.SIGINT) is held:  # notebooks set Python's own anew for each cell
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if held.has_come:
                raise KeyboardInterrupt


logger = logging.getLogger("tiered_zero")


@final
class Teardown:
    """Calls the closing functions of a run in a fixed order. One thread at a time uses it. Each function must be
    idempotent: a function that a second Ctrl-C interrupts is called again."""

    def __init__(self, order: Sequence[str]) -> None:
        """`order`: the names that `add` accepts, in the order in which `close` calls their functions. For one name, the
        function added last is called first."""
        self._acts: dict[str, list[Callable[[], Any]]] = {name: [] for name in order}

    def add(self, name: str, act: Callable[[], Any]) -> None:
        self._acts[name].append(act)

    @hold_interrupts()
    def close(self) -> None:
        """Call each function that has not been called, then raise the first error. Idempotent."""
        first: Exception | None = None
        for acts in self._acts.values():
            while acts:
                try:
                    acts[-1]()
                except Exception as error:
                    first = first or error
                acts.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Teardown:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        """Call `close` if the block has raised. Otherwise do nothing: the run now owns the teardown."""
        if error is None:
            return
        try:
            self.close()
        except Exception as failure:
            logger.error("what was built of the run could not be freed: %s", failure)
        except BaseException:
            self.close()  # after a second Ctrl-C too: the caller gets no engine to close
            raise


def once(act: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls `act` at its first call only, even if that call is interrupted. Use it for a closing
    function that may be left unfinished after an interrupt."""
    called: list[None] = []

    def call() -> None:
        if not called:
            called.append(None)
            act()

    return call
