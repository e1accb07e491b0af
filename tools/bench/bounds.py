"""What this machine's memory and disk carry: the bounds that steps are held against."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial

import torch


def measure_triad(nbytes: int, rounds: int = 5) -> float:
    """Bytes/s of a = b + 3 c over arrays of `nbytes`, the line that a store fetches first counted: best of `rounds`."""
    a, b, c = (torch.rand(nbytes // 8, dtype=torch.float64) for _ in range(3))
    best_s = float("inf")
    for _ in range(rounds):
        start_s = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 4 * nbytes / best_s


def measure_disk(directory: str, nbytes: int, seconds: float, read_shares: Sequence[float]) -> list[float]:
    """Bytes/s with so much of the bytes read and the rest written at the same time, for each share; through the engine
    that a run in `directory` chooses, on one file of `nbytes`."""
    from tiered_zero.io.select import fill_file, measure_rate, select_engine

    path = os.path.join(directory, "bench.bin")
    selection = select_engine(directory)
    try:
        if not os.path.exists(path):
            fill_file(path, nbytes)
        measure = partial(measure_rate, selection.engine, path, nbytes, "mixed", seconds)
        return [measure(read_share=share) for share in read_shares]
    finally:
        selection.engine.close()
