"""The names for programs that call PyTorch's Distributed Checkpoint themselves; this package imports the modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from tiered_zero.checkpoint.file_reader import FileReader
from tiered_zero.checkpoint.file_writer import FileWriter, Piece
from tiered_zero.checkpoint.tag_reader import GroupPlanner
from tiered_zero.checkpoint.tensors import dtype_name, torch_dtype
from tiered_zero.errors import TieredZeroError

__all__ = ["FileReader", "FileWriter", "GroupPlanner", "Piece", "dtype_name", "our_errors", "torch_dtype"]


@contextmanager
def our_errors() -> Iterator[None]:
    """Raise what went wrong in a call of Distributed Checkpoint itself, in place of its CheckpointException."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        ours = [cause for cause in causes if isinstance(cause, TieredZeroError) or not isinstance(cause, Exception)]
        raise (ours or causes)[0] from None
