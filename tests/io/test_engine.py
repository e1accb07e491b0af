"""IOSettings."""

import pytest

from tiered_zero.io.engine import IOSettings
from tiered_zero.sizes import GIB, MIB


@pytest.mark.parametrize(
    ("block_size", "block_nbytes"), [(MIB, MIB), (1, 4096), (0, 4096), (5000, 8192), (1 << 40, GIB)]
)
def test_blocks_are_whole_pages_that_one_call_can_move(block_size: int, block_nbytes: int) -> None:
    assert IOSettings(block_size=block_size).block_nbytes == block_nbytes


@pytest.mark.parametrize(("depth", "threads", "num_workers"), [(8, 1, 8), (32, 8, 32), (0, 0, 1), (2, 3, 6)])
def test_depth_and_parallelism_make_the_pool(depth: int, threads: int, num_workers: int) -> None:
    assert IOSettings(queue_depth=depth, intra_op_parallelism=threads).num_workers == num_workers
