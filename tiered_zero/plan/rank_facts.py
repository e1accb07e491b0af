"""Compare the facts of all ranks, and name the first difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiered_zero.errors import RankError

Exchange = Callable[[bytes, str], list[bytes]]
"""Returns to every rank the bytes of all ranks, in rank order: `Collectives.exchange`."""


def compare_facts(facts: Mapping[str, Any], exchange: Exchange) -> None:
    """Compare `facts` (name -> a JSON value) with those of the other ranks, by hashes first. If they differ, every rank
    raises RankError, which names the first difference and both values."""
    texts = {what: json.dumps(value, sort_keys=True).encode() for what, value in facts.items()}
    digests = {what: hashlib.sha256(text).hexdigest()[:16] for what, text in texts.items()}
    found = [json.loads(message) for message in exchange(json.dumps(digests).encode(), "the plan")]
    for what in dict.fromkeys(what for theirs in found for what in theirs):
        others = [rank for rank, theirs in enumerate(found) if theirs.get(what) != found[0].get(what)]
        if not others:
            continue
        own = json.dumps(facts.get(what)).encode()
        values = [json.loads(message) for message in exchange(own, f"the {what} of each rank")]
        path, first, other = _first_difference(values[0], values[others[0]])
        where = "".join(f"{each} of " for each in reversed(path)).removesuffix(" of ")
        raise RankError(
            f"All ranks must have the same {what}; found {where}{' ' if where else ''}{_text(first)} on "
            f"rank 0, {_text(other)} on rank {others[0]}. Build the model, the optimizer and the config in the same "
            "way on all of them."
        )


def _first_difference(first: Any, other: Any, path: Sequence[str] = ()) -> tuple[Sequence[str], Any, Any]:
    """Return the path of the first value that differs, and both values; None stands for a missing value. Keys that only
    one rank has come first, because they change the values of other keys."""
    if isinstance(first, dict) and isinstance(other, dict):
        alone = [key for key in (*first, *other) if (key in first) != (key in other)]
        for key in (*alone, *first):
            if first.get(key) != other.get(key):
                return _first_difference(first.get(key), other.get(key), (*path, key))
    return path, first, other


def _text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
