"""Tests on the lagging device; without what builds it they are skipped, and the reason says so."""

from collections.abc import Iterator

import pytest

from tests.lagging.build import build, why_not
from tests.lagging.child import Child
from tests.lagging.ranks import LaggingRanks


@pytest.fixture(scope="session")
def lagging() -> Iterator[Child]:
    """A process whose CUDA is the lagging device."""
    if reason := why_not():
        pytest.skip(reason)
    child = Child(build())
    yield child
    child.close()


@pytest.fixture(scope="session")
def lagging_ranks() -> Iterator[LaggingRanks]:
    """Two such processes, as the ranks of a launcher."""
    if reason := why_not():
        pytest.skip(reason)
    ranks = LaggingRanks(build())
    yield ranks
    ranks.close()
