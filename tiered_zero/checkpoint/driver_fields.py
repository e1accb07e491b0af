"""The driver state as a file has it: untrusted, decoded and checked field by field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tiered_zero.checkpoint.values import decode
from tiered_zero.errors import StoreError
from tiered_zero.grads.overflow import OverflowCounts
from tiered_zero.store.checked_json import MOST_INTEGER

State = dict[str, Any]

OWN_PARTS = ("random_states", "loader")
"""What each rank has its own of."""

_PARTS = (
    "counts", "overflow", "loss_scaler", "num_applied", "skipped", "groups", "lr_scheduler", "random_states", "loader",
    "modules", "client_state",
)  # fmt: skip


def read_client_state(saved: Any) -> dict[str, Any]:
    """Decode the client_state of what `DriverState.capture` gave, as it was read from a file. Raises StoreError."""
    return dict(decode_state(saved)["client_state"])


def decode_state(saved: Any) -> State:
    """Decode what `DriverState.capture` gave, and each rank's `own_state` if there were others. Raises StoreError."""
    if type(saved) is not dict or saved.keys() - {"ranks"} != set(_PARTS):
        found = sorted(saved)[:12] if type(saved) is dict else type(saved).__name__
        raise StoreError(f"The checkpoint's driver state was expected to have {', '.join(_PARTS)}; found {found!a}.")
    state = {}
    for name in _PARTS:
        try:
            state[name] = decode(saved[name])
        except ValueError as error:
            raise StoreError(f"The checkpoint's {name} cannot be read: {error}.") from None
    if "ranks" in saved:
        state["ranks"] = _decode_ranks(saved["ranks"])
    if type(state["client_state"]) is not dict:
        raise StoreError("The checkpoint's client_state was expected as a dict.")
    return state


def _decode_ranks(saved: Any) -> list[State]:
    if (
        type(saved) is not list
        or not saved
        or any(type(own) is not dict or own.keys() != set(OWN_PARTS) for own in saved)
    ):
        raise StoreError("The checkpoint's state of each rank is not what was saved.")
    try:
        return [{name: decode(own[name]) for name in OWN_PARTS} for own in saved]
    except ValueError as error:
        raise StoreError(f"The checkpoint's state of each rank cannot be read: {error}.") from None


def check_counts(state: State) -> None:
    """Raise StoreError for counts, loss scale and schedule that no run has."""
    overflow, scaler = state["overflow"], state["loss_scaler"]
    count, flag = _is_count, _is_flag
    _check_fields("counts", state["counts"], {
        "micro_steps": count, "global_steps": count, "boundary": lambda v: v is None or flag(v),
        "one_backward_each": flag, "was_applied": flag, "grad_check": lambda v: v is None or type(v) is dict,
    })  # fmt: skip
    check = state["counts"]["grad_check"]
    if check is not None:
        named = {"first_bad": lambda value: value is None or type(value) is str}
        _check_fields("counts", check, {"finite": flag, "norm": _is_float, "grad_scale": _is_float, **named})
    _check_fields("overflow", overflow, dict.fromkeys(asdict(OverflowCounts()), count))
    if scaler is not None:
        scale = {
            "scale": lambda v: _is_float(v) and 0 < v < math.inf,
            "last_overflow": lambda v: count(v) or (type(v) is int and v == -1),
        }
        _check_fields("loss_scaler", scaler, {**scale, "step": count, "credits": count})
    schedule = state["lr_scheduler"]
    if schedule is not None:
        _check_fields("lr_scheduler", schedule, {"type": lambda v: type(v) is str, "state": lambda v: True})
    if not count(state["num_applied"]) or not flag(state["skipped"]):
        raise StoreError("The checkpoint's num_applied and skipped are not what was saved.")


def _check_fields(name: str, found: Any, tests: Mapping[str, Callable[[Any], bool]]) -> None:
    if type(found) is not dict or found.keys() != tests.keys():
        raise StoreError(f"The checkpoint's {name} was expected to have {', '.join(tests)}; found {found!a:.200}.")
    for field, test in tests.items():
        if not test(found[field]):
            raise StoreError(f"The checkpoint's {name} has {found[field]!a:.80} as {field}, which is never saved.")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_INTEGER


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_float(value: Any) -> bool:
    return type(value) in (int, float)
