"""Processes by fork of one that has imported what tests use, which takes four to seven seconds of the processor.

Programs whose start or end is what is tested, or that read a variable while they import, are started by subprocess.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

IMPORTS = "tests.support.fork_server"


def fork_context() -> ForkServerContext:
    """The first process that is made in it starts the one of which all are forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTS])
    return context


def call_in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, of a module's top level, in a new process, and return what it returns. Raises AssertionError
    where it raises, whose traceback goes to this process's stderr."""
    context = fork_context()
    answer, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        return answer.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"{function.__qualname__} ended with exit code {process.exitcode}") from None
    finally:
        process.join()
        answer.close()


def _answer(answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    answer.send(function(*args))


class ForkedProcess:
    """A process that does what `python COMMAND...` does but for its imports: a script, -m and a module, -c and code.
    Its methods are those of subprocess.Popen. `stdout`, `stderr`: files, to which it appends."""

    def __init__(
        self,
        *command: object,
        stdout: Path,
        stderr: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        arguments = (list(map(str, command)), dict(os.environ if env is None else env), str(cwd or os.getcwd()))
        self._process = fork_context().Process(target=run_program, args=(*arguments, str(stdout), str(stderr)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProgram(ForkedProcess):
    """One of which what it has printed is wanted when it has ended."""

    def __init__(self, *command: object, env: Mapping[str, str] | None = None) -> None:
        self._out, self._err = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115
        super().__init__(*command, env=env, stdout=Path(self._out.name), stderr=Path(self._err.name))

    def end(self, timeout_s: float = 540.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end; return its exit code, and what it has printed. One that has not ended in time is killed."""
        try:
            code = self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.wait()
        with self._out, self._err:
            out, err = (Path(file.name).read_text() for file in (self._out, self._err))
        return subprocess.CompletedProcess("", code, out, err)


def run_forked(*command: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND...`, see `ForkedProcess`, to its end."""
    return ForkedProgram(*command, env=env).end()


def run_program(command: list[str], environment: dict[str, str], directory: str, out: str, err: str) -> None:
    """Do in this process, which is a fork, what `ForkedProcess` says."""
    for number, name in enumerate((out, err), start=1):
        with open(name, "ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:
        sys.last_value = error  # as Python does, before it calls what was registered
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()
