"""Descriptors are closed once, and with their object."""

import gc
import os
import subprocess
import sys
from pathlib import Path

from tiered_zero.system.descriptor import CLOSED, opened


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_the_end_of_a_block_closes(tmp_path: Path) -> None:
    with opened(tmp_path, os.O_RDONLY) as fd:
        assert is_open(fd)
        assert not fd.closed
    assert fd.closed
    assert not is_open(fd)


def test_a_number_that_is_used_again_is_not_closed_again(tmp_path: Path) -> None:
    fd = opened(tmp_path, os.O_RDONLY)
    fd.close()
    other = os.open(tmp_path, os.O_RDONLY)
    assert other == fd
    fd.close()
    del fd
    gc.collect()
    assert is_open(other)
    os.close(other)


def test_it_is_closed_with_the_object(tmp_path: Path) -> None:
    fd = opened(tmp_path, os.O_RDONLY)
    number = int(fd)
    del fd
    gc.collect()
    assert not is_open(number)


def test_none_is_closed() -> None:
    CLOSED.close()
    assert CLOSED.closed


def test_the_end_of_the_interpreter_is_silent() -> None:
    """Modules are emptied before the last objects go."""
    code = "import os; from tiered_zero.system.descriptor import opened; kept = opened('.', os.O_RDONLY)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
