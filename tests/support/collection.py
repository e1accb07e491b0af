"""How the workers of pytest-xdist, each of which collects every test, share what collection costs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def import_tests(config: pytest.Config) -> None:
    """Import the chosen test modules before they are collected, each worker beginning with others, and leave their
    rewritten assertions beside them (__pycache__) for the other workers: rewriting takes 7 s of the processor, half
    of a worker's collection. With PYTHONDONTWRITEBYTECODE, or in a new checkout, each would rewrite all of them.
    """
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        return
    modules = _chosen_modules(config.args)
    first = len(modules) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = False
    try:
        for name in modules[first:] + modules[:first]:
            with suppress(Exception, pytest.skip.Exception):  # the collection says it
                importlib.import_module(name)
    finally:
        sys.dont_write_bytecode = writes


def _chosen_modules(arguments: Sequence[str]) -> list[str]:
    chosen = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if any(file.is_relative_to(path) for path in chosen)
    ]
