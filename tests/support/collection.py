"""How the workers of pytest-xdist, each of which collects every test, share what collection costs, and the tests."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
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


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Order files, as workers get them: those with a test that is marked slow, then by their number of tests. A long
    one that is begun last keeps one worker busy when the others have nothing left."""
    num_tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: (item.path not in slow, -num_tests[item.path], item.path))


def _chosen_modules(arguments: Sequence[str]) -> list[str]:
    chosen = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if any(file.is_relative_to(path) for path in chosen)
    ]
