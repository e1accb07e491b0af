"""Parity is shown on tiny models."""

import pytest


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """See `one_thread`."""
