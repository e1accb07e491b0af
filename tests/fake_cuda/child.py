"""Runs a test's body in a process of its own, under the fake CUDA runtime.

    python -m tests.fake_cuda.child MODULE NAME ARGUMENTS

calls `NAME(device, **ARGUMENTS)` of a module; ARGUMENTS are JSON. The libraries have to be there as the process starts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.lagging.child import as_test

DEADLINE_S = 500.0
"""A body that takes longer is ended before pytest's own limit comes."""

NOTHING: Mapping[str, str] = {}


def on_fake_cuda(body: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function `body(device, ...)`, which runs in a child; pytest gives its other arguments."""
    return as_test(body, "fake_cuda")


class FakeCudaProcesses:
    """Processes whose torch finds the libraries of `folder` in CUDA's place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, body: Callable[..., None], environment: Mapping[str, str] = NOTHING, **arguments: Any) -> None:
        """Run `body(device, **arguments)`, of a module's top level; fail where it raises, with what it has printed."""
        variables = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self._folder),
            "LD_PRELOAD": str(self._folder / "libfake_cuda.so"),
            "PYTHONFAULTHANDLER": "1",
            **environment,
        }
        command = [sys.executable, "-m", __name__, body.__module__, body.__qualname__]
        command.append(json.dumps(arguments, default=str))
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DEADLINE_S)
        print(done.stdout, end="")
        assert done.returncode == 0, f"exit {done.returncode} under the fake CUDA runtime\n{done.stderr[-8000:]}"
        assert "fake CUDA:" not in done.stderr, f"calls that CUDA forbids\n{done.stderr[-8000:]}"


class FakeCuda:
    """The settings and counts of this process's device. See runtime/fake.h."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libfake_cuda.so")
        self._library.fake_cuda_counts.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.fake_cuda_set_capacity.argtypes = [ctypes.c_size_t]
        self._library.fake_cuda_set_pinnable.argtypes = [ctypes.c_size_t]

    def set_capacity(self, nbytes: int) -> None:
        """Let the device have that much memory from now on."""
        self._library.fake_cuda_set_capacity(nbytes)

    def set_pinnable(self, nbytes: int) -> None:
        """Let that much host memory be pinned at most from now on."""
        self._library.fake_cuda_set_pinnable(nbytes)

    def counts(self) -> dict[str, int]:
        """Return what was counted since the process began, by the names of runtime/fake.h."""
        text = ctypes.create_string_buffer(1 << 14)
        self._library.fake_cuda_counts(text, len(text))
        return {name: int(count) for name, count in (line.split() for line in text.value.decode().splitlines())}


def main(module: str, name: str, arguments: str) -> None:
    import torch

    torch.manual_seed(0)
    function = getattr(importlib.import_module(module), name)
    getattr(function, "body", function)(FakeCuda(), **json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
