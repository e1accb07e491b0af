"""A small set of cases in which every two values of any two factors meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, cycle, product
from typing import Any

Case = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]], excluded: Mapping[str, Callable[[Case], bool]] | None = None
) -> list[Case]:
    """Cases over all factors, the same in each call. `excluded`: why -> whether a case cannot be.

    Greedy: the case with the most pairs that have not met comes next (pairs are bits of a number). Pairs that meet in
    no possible case are left out.
    """
    possible = [
        case for case in _product(factors) if not any(is_excluded(case) for is_excluded in (excluded or {}).values())
    ]
    numbers: dict[Any, int] = {}
    masks = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(case)) for case in possible]
    missing = (1 << len(numbers)) - 1
    chosen: list[Case] = []
    while missing:
        best = max(range(len(possible)), key=lambda index: (missing & masks[index]).bit_count())
        missing &= ~masks[best]
        chosen.append(possible[best])
    return chosen


def pairs_of(case: Case) -> set[tuple[str, Any, str, Any]]:
    return {(left, case[left], right, case[right]) for left, right in combinations(sorted(case), 2)}


def name_of(case: Case) -> str:
    """For a test's id: the values, and the names of flags that are set."""
    parts = (name if value is True else str(value) for name, value in case.items() if value is not False)
    return "-".join(parts)


def _product(factors: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def by_turns(items: Sequence[Any], others: Sequence[Any], num: int = 1) -> list[tuple[Any, Any]]:
    """Each item with `num` of the others, which come by turns: for two factors that no line of the code reads together,
    so that what is wrong with one value shows beside any value of the other."""
    turns = cycle(others)
    return [(item, next(turns)) for item in items for _ in range(num)]
