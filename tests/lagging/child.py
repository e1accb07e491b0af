"""A process whose CUDA is the lagging device, and tests whose bodies run in it.

The device is put in place once and cannot be taken away, so the process of the other tests never has it. A body that
crashes ends this process, and not the suite; the next one gets a new process.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
"""A body that takes longer is ended by SIGABRT, and its test fails with the stacks of all its threads. A test of two
bodies ends so before pytest's own limit comes."""


def on_device(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function `body(device, ...)`, which runs in the child; pytest gives its other arguments."""

    def test(lagging: Child, **arguments: Any) -> None:
        lagging.run(body, **arguments)

    own = inspect.Parameter("lagging", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = list(inspect.signature(body).parameters.values())[1:]
    vars(test).update(__signature__=inspect.Signature([own, *others]), body=body)
    test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
    test.__module__ = body.__module__
    return test


@dataclass(frozen=True)
class Outcome:
    """What a body returned, or what it raised: the class's name and the traceback. "exit -11": the process crashed;
    "hung for 240 s (exit -6)": it was ended."""

    value: Any = None
    error: str = ""
    traceback: str = ""


class Child:
    """The process, started at the first use and after a crash."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, body: Callable[..., Any], **arguments: Any) -> Any:
        """Return what `body(device, **arguments)`, of a module's top level, returns there; fail where it raises."""
        outcome = self.outcome(body, **arguments)
        assert not outcome.error, f"{outcome.error} on the lagging device\n{outcome.traceback}"
        return outcome.value

    def outcome(self, body: Callable[..., Any], **arguments: Any) -> Outcome:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        watchdog = _Watchdog(self._process)
        try:
            pickle.dump((body.__module__, body.__qualname__, arguments), self._process.stdin)
            self._process.stdin.flush()
            return Outcome(*pickle.load(self._answers))
        except (EOFError, BrokenPipeError):
            error = f"exit {self._process.wait()}"
            error = f"hung for {DEADLINE_S:g} s ({error})" if watchdog.has_ended_it else error
            return Outcome(error=error, traceback=self._end())
        finally:
            watchdog.cancel()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._end()

    def _start(self) -> None:
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "tests.lagging.child", str(self._library), str(write)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=[write], cwd=ROOT
        )
        os.close(write)
        self._answers = os.fdopen(read, "rb")
        if not self._answers.peek(1):  # it has ended, and its first answer never came
            raise RuntimeError(f"the lagging device cannot be started:\n{self._end()}")
        pickle.load(self._answers)

    def _end(self) -> str:
        """Forget the process, which has ended or is ending; return what it has written."""
        assert self._process is not None and self._process.stdin is not None
        self._process.wait()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")[-6000:]
        with open(os.devnull, "wb") as nowhere:  # what is left in the buffer has no reader
            os.dup2(nowhere.fileno(), self._process.stdin.fileno())
        self._process.stdin.close()
        self._answers.close()
        self._log.close()
        self._process = None
        return text


class _Watchdog:
    """Ends a process that does not answer. SIGABRT lets faulthandler write the stacks first."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.has_ended_it = False
        self._process = process
        self._timers = [threading.Timer(DEADLINE_S, self._abort), threading.Timer(DEADLINE_S + 20, process.kill)]
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _abort(self) -> None:
        self.has_ended_it = True
        self._process.send_signal(signal.SIGABRT)


def run_body(device: Any, module: str, name: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Run one body, with the device as it is at first."""
    import torch

    device.reset()
    torch.manual_seed(0)
    torch.accelerator.set_device_index(0)
    try:
        function = getattr(importlib.import_module(module), name)
        return (getattr(function, "body", function)(device, **arguments),)
    except BaseException as error:
        return None, type(error).__name__, "".join(traceback.format_exception(error)[-12:])
    finally:
        gc.collect()


def main(library: str, descriptor: str) -> None:
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)  # of the streams' threads, too

    from tests.lagging.cuda import LaggingDevice
    from tests.support.imports import freeze_imports

    device = LaggingDevice(Path(library))
    freeze_imports()
    with os.fdopen(int(descriptor), "wb") as answers:
        pickle.dump("ready", answers)
        answers.flush()
        while True:
            try:
                module, name, arguments = pickle.load(sys.stdin.buffer)
            except EOFError:
                os._exit(0)  # streams' threads run on: nothing is destroyed under them
            answer = run_body(device, module, name, arguments)
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
