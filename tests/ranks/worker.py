"""A rank's process: runs the cases that its parent sends, each in the environment of a launcher."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from tests.support.imports import freeze_imports

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


def main() -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(120, exit=False)
    torch.set_num_threads(1)
    freeze_imports()
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        while True:
            try:
                case = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            faulthandler.dump_traceback_later(120, exit=False)
            answer = run(*case)
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    main()
