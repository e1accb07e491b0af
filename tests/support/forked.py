"""Processes by fork of one that has imported what tests use, which takes four to seven seconds of the processor."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

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
