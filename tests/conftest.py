"""No network, child processes alike, and the ring of tests; what all tests share is in tests/support/fixtures.py."""

import gc
import importlib
import os

import pytest

from tests.support.children import environment
from tests.support.rings import choose_ring

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= environment()
gc.disable()  # until `freeze_imports`: what is imported stays, and the collector takes a sixth of the time


def pytest_configure(config: pytest.Config) -> None:
    """Choose the ring. A process that starts workers collects no test: it need not import torch, seconds before the
    first worker."""
    choose_ring(config)
    starts_workers = config.getoption("numprocesses", None) and not config.getoption("collectonly")
    if hasattr(config, "workerinput") or not starts_workers:
        config.pluginmanager.register(importlib.import_module("tests.support.fixtures"))
