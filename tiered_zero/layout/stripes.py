"""How a store's bytes are laid over its files: stripes in turn, weighted by speed."""

from __future__ import annotations

from collections.abc import Sequence

STRIPE_NBYTES = 4 << 20
"""One stripe: large enough for a disk to run at full rate, small enough that one record uses every disk."""

STRIPES_PER_CYCLE = 64
"""Stripes in one cycle over all paths; a weight is met to within 1/128 of the whole."""


def stripe_cycle(weights: Sequence[float]) -> list[int]:
    """File index of each stripe of a cycle: file i occurs in proportion to weights[i], evenly spread."""
    credit = [0.0] * len(weights)
    cycle = []
    for _ in range(STRIPES_PER_CYCLE):
        credit = [have + weights[index] for index, have in enumerate(credit)]
        index = credit.index(max(credit))
        credit[index] -= sum(weights)
        cycle.append(index)
    return cycle


def file_nbytes(capacity_nbytes: int, weights: Sequence[float]) -> list[int]:
    """Bytes of each file of a store; they sum to the capacity exactly."""
    if len(weights) == 1:
        return [capacity_nbytes]
    cycle = stripe_cycle(weights)
    num_cycles, rest = divmod(capacity_nbytes, STRIPE_NBYTES * len(cycle))
    sizes = [num_cycles * cycle.count(index) * STRIPE_NBYTES for index in range(len(weights))]
    for index in cycle:
        piece = min(rest, STRIPE_NBYTES)
        sizes[index] += piece
        rest -= piece
    return sizes
