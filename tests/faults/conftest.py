"""Faults in whole training runs."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """See `one_thread`."""
