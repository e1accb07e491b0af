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
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.support.forked import fork_context

DEADLINE_S = 500.0
"""A body that takes longer is ended, and its test fails with the stacks of all its threads. A test of two bodies ends
so before pytest's own limit comes."""

LOG_NBYTES = 20_000
NOTHING: Mapping[str, str] = {}


def on_device(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function `body(device, ...)`, which runs in the child; pytest gives its other arguments."""
    return as_test(body, "lagging")


def as_test(body: Callable[..., None], fixture: str) -> Callable[..., None]:
    """Make a test that `fixture` runs `body` in, with the other arguments, which pytest gives."""

    def test(**arguments: Any) -> None:
        arguments.pop(fixture).run(body, **arguments)

    own = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = list(inspect.signature(body).parameters.values())[1:]
    vars(test).update(__signature__=inspect.Signature([own, *others]), body=body)
    test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
    test.__module__ = body.__module__
    return test


@dataclass(frozen=True)
class Outcome:
    """What a body returned, or what it raised: the class's name and the traceback. "exit -11": the process crashed;
    "hung for 240 s, exit -6": it was ended."""

    value: Any = None
    error: str = ""
    traceback: str = ""


class Child:
    """The process, started at the first use and after a crash."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._process: ForkServerProcess | None = None

    def run(self, body: Callable[..., Any], **arguments: Any) -> Any:
        """Return what `body(device, **arguments)`, of a module's top level, returns there; fail where it raises."""
        outcome = self.outcome(body, **arguments)
        assert not outcome.error, f"{outcome.error} on the lagging device\n{outcome.traceback}"
        return outcome.value

    def outcome(self, body: Callable[..., Any], **arguments: Any) -> Outcome:
        self.start(body, **arguments)
        return self.answer()

    def start(self, body: Callable[..., Any], environment: Mapping[str, str] = NOTHING, **arguments: Any) -> None:
        """Run a body, without waiting for it, with `environment` in os.environ. `answer` returns what becomes of it."""
        if self._process is None:
            self._start_process()
        self._started = time.monotonic()
        self.pipe.send((body.__module__, body.__qualname__, arguments, dict(environment)))

    def answer(self, deadline_s: float = DEADLINE_S) -> Outcome:
        """Wait for the body that was started. A process that has not answered in time is ended by SIGABRT: faulthandler
        writes the stacks first."""
        error = ""
        try:
            if self.pipe.poll(deadline_s):
                return Outcome(*self.pipe.recv())
            error = f"hung for {time.monotonic() - self._started:.0f} s, "
            self._end_by(signal.SIGABRT)
        except (EOFError, ConnectionError):
            pass
        assert self._process is not None
        self._process.join()
        error += f"exit {self._process.exitcode}"
        return Outcome(error=error, traceback=self._end())

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._end()

    def _start_process(self) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        context = fork_context()
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, str(self._library), self._log.name))
        self._process.start()
        theirs.close()

    def _end_by(self, number: int) -> None:
        assert self._process is not None and self._process.pid is not None
        os.kill(self._process.pid, number)
        self._process.join(20)
        self._process.kill()

    def _end(self) -> str:
        """Forget the process, which has ended or is ending; return what it has written."""
        assert self._process is not None
        self._process.join()
        self._process.close()
        self._process = None
        self.pipe.close()
        with self._log:
            return self._log.read().decode(errors="replace")[-LOG_NBYTES:]


def run_body(
    device: Any, module: str, name: str, arguments: dict[str, Any], environment: dict[str, str]
) -> tuple[Any, ...]:
    """Run one body, with the device as it is at first."""
    import torch
    import torch.distributed as dist

    device.reset()
    os.environ |= environment
    torch.manual_seed(0)
    torch.accelerator.set_device_index(0)
    try:
        function = getattr(importlib.import_module(module), name)
        return (getattr(function, "body", function)(device, **arguments),)
    except BaseException as error:
        return None, type(error).__name__, "".join(traceback.format_exception(error)[-12:])
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        for variable in environment:
            del os.environ[variable]


def main(bodies: Connection, library: str, log: str) -> None:
    """Run bodies as they come. `log`: the file of what this process and its libraries print."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)  # of the streams' threads, too

    from tests.lagging.cuda import LaggingDevice
    from tests.support.imports import freeze_imports

    device = LaggingDevice(Path(library))
    freeze_imports()
    while True:
        try:
            body = bodies.recv()
        except EOFError:
            os._exit(0)  # streams' threads run on: nothing is destroyed under them
        bodies.send(run_body(device, *body))
