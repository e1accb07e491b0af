"""What processes that tests start have in common with their parent."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

NUM_THREADS = 2
"""Of torch's own operations: the same order of sums on every machine, and more than one thread at work."""


def environment() -> dict[str, str]:
    """Variables with which a child process, wherever it starts, imports the same tiered_zero, which may be an installed
    one with compiled libraries, finds this folder, and adds in the same order."""
    found = importlib.util.find_spec("tiered_zero")
    assert found is not None and found.origin is not None, "tiered_zero is installed, or in the working directory"
    paths = [str(Path(found.origin).parents[1]), str(Path(__file__).resolve().parents[2])]
    return {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONSAFEPATH": "1",  # the working directory does not come first
        "OMP_NUM_THREADS": str(NUM_THREADS),
        "MKL_NUM_THREADS": str(NUM_THREADS),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads spin when it is imported
        "OMP_WAIT_POLICY": "passive",  # a thread that spins keeps the other tests from the core that it waits for
    }
