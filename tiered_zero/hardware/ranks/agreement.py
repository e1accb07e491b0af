"""Run a function on every rank. Every rank gets the results of all ranks; if the function raises on one, all raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from tiered_zero import errors
from tiered_zero.hardware.ranks.collectives import Collectives

Result = TypeVar("Result")


def agree(
    ranks: Collectives,
    call: str,
    act: Callable[[], Result],
    *,
    encode: Callable[[Result], Any] = lambda result: result,
    decode: Callable[[Any], Result] = lambda value: value,
) -> list[Result]:
    """Run `act` on every rank and return the results in rank order. Driver thread, on all ranks at the same time;
    blocks until the slowest has ended. With one rank it returns `[act()]`.

    An error of `act` on one rank is raised there; the other ranks raise an error of that class which names the rank.
    Ranks thus stay in step, and the run can go on. An `act` that makes collectives and fails between them must call
    `ranks.fail`, since the other ranks wait in a collective instead of for its result. `call`: names the act in errors.
    `encode`, `decode`: convert a result to JSON and back. Raises RankError if another rank makes another `call`, fails
    or does not answer; an error of `act` on this rank is the RankError's cause then.
    """
    if ranks.world_size == 1:
        return [act()]
    failure: Exception | None = None
    value: Any = None
    try:
        try:
            value = encode(act())
        except Exception as error:
            failure = error
        failed = None if failure is None else [type(failure).__name__, str(failure)]
        messages = ranks.exchange(json.dumps({"call": call, "error": failed, "value": value}).encode(), call)
    except errors.RankError as error:
        if failure is None:
            raise
        raise error from failure
    except (KeyboardInterrupt, SystemExit) as interrupt:
        # the others wait for this rank's answer, or have it and continue
        ranks.fail(f"{call}: {type(interrupt).__name__}")
        raise
    if failure is not None:
        raise failure
    found = [json.loads(message) for message in messages]
    for rank, message in enumerate(found):
        if message["error"] is not None:
            kind, text = message["error"]
            raise _class_of(kind)(f"Rank {rank}: {text}")
    return [decode(message["value"]) for message in found]


def _class_of(name: str) -> type[errors.TieredZeroError]:
    """Return the error class of this package that is called `name`, or TieredZeroError if there is none."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, errors.TieredZeroError) else errors.TieredZeroError
