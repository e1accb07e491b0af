"""A failed test fails alone: the tests behind it in its process find nothing of it."""

import gc
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.failed_tests import end_failed_test
from tests.support.models import ParityGPT
from tests.support.trainers import tiered
from tiered_zero.optim import OffloadedOptimizer


def fail(swap_path: Path) -> None:
    optimizer = OffloadedOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW, {"device": "cpu"})
    engine = tiered(ParityGPT(), swap_path)
    gc.disable()
    try:
        raise KeyError(engine, optimizer)
    except KeyError as error:
        raise AssertionError from error


@pytest.mark.usefixtures("no_leaks")
def test_engines_handlers_and_files_of_a_failed_test_end(swap_path: Path) -> None:
    threads = set(threading.enumerate())
    try:
        fail(swap_path)
    except AssertionError as error:
        failure = error  # as pytest keeps it
    end_failed_test(failure)
    assert gc.isenabled() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not list(swap_path.iterdir())
    assert not {each.name for each in set(threading.enumerate()) - threads if each.name.startswith("tiered_zero")}
