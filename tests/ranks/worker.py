"""A rank's process: runs the cases that its parent sends, each in the environment of a launcher."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.support.native_build import ROOT

PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def run(environment: dict[str, str], module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    os.environ.update(environment)
    torch.manual_seed(1000 + int(environment["RANK"]))  # each rank draws its own numbers unless a case sets a seed
    try:
        function = getattr(importlib.import_module(module), name)
        return (function(*args, **kwargs),)
    except BaseException as error:
        return None, type(error).__name__, str(error), traceback.format_exc()
    finally:
        gc.collect()
        if PROCESSORS:
            os.sched_setaffinity(0, PROCESSORS)  # an engine has bound this rank to its share
        if dist.is_initialized():
            dist.destroy_process_group()


def main(cases: Connection, log: str) -> None:
    """`log`: the file of what this process and its libraries print."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    sys.path.append(str(ROOT))  # for tools, whichever test has started this process
    torch.set_num_threads(1)
    while True:
        try:
            case = cases.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(120, exit=False)
        cases.send(run(*case))
