"""Messages for parameters whose bytes cannot be read now."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiered_zero.errors import BudgetError, ModelError, ParameterOffloadedError
from tiered_zero.sizes import format_nbytes

_CONVERSIONS = frozenset("to cpu cuda type float double half bfloat16".split())


def is_conversion(function: str) -> bool:
    """Whether `function` returns the tensor itself where it is as wanted, which `module.to()` relies on."""
    return function in _CONVERSIONS


def offloaded_error(
    function: str, param: str, tier: str, dtype: torch.dtype, device: torch.device
) -> ParameterOffloadedError:
    """`param`, by name, rests on `tier`; it is of `dtype` on `device` wherever it is used."""
    if is_conversion(function):
        return ParameterOffloadedError(
            f"{function} cannot move or convert parameter {param!r}: it is {dtype} on {device} wherever it is used, "
            f"and rests on tier {tier} between uses. Leave out module.to(...), .cpu(), .half() and the like: set the "
            "precision in the config (bf16, fp16), and read values inside `with tiered_zero.gathered(param):`, or from "
            "engine.module.state_dict()."
        )
    return ParameterOffloadedError(
        f"{function} needs the bytes of parameter {param!r}, which rest on tier {tier} between uses. Read it inside "
        "`with tiered_zero.gathered(param):` (modify=True to change it), or use it in the forward of a module, which "
        "is called as module(...); engine.module.state_dict() has a copy."
    )


def used_before_step_error(unit: str) -> ModelError:
    return ModelError(
        f"Unit {unit} is used before step(), but its update has begun in backward, as it does where nothing is clipped "
        'or checked. Set "tiered_zero": {"optimizer_in_backward": false} for such a loop.'
    )


def changed_since_forward_error(unit: str) -> ModelError:
    return ModelError(
        f"Backward needs weights of {unit} as its forward saw them, and they have changed since (by a step, or by "
        "hand). Call backward before step(), or forward again after it."
    )


def changed_past_home_error(param: str) -> ModelError:
    return ModelError(
        f"The values of parameter {param} were changed in forward or between steps, but not at its home on the tiers: "
        "the next update would undo that. Change parameters between steps, inside "
        "`with tiered_zero.gathered(param, modify=True):`."
    )


def gathered_error(unit: str) -> ModelError:
    return ModelError(
        f"Unit {unit} is in use by tiered_zero.gathered() while a step is about to change it. Leave the `with` block "
        "before step()."
    )


def no_room_error(unit: str, nbytes: int, held: Sequence[str], live_nbytes: int, room_nbytes: int) -> BudgetError:
    """`held`: names of the units that are on the device."""
    return BudgetError(
        f"Unit {unit} needs {format_nbytes(nbytes)}, but units in use at the same time already fill "
        f"{format_nbytes(live_nbytes)} of the {format_nbytes(room_nbytes)} that paged parameters may take on the "
        f"device (on it: {', '.join(held)}). Raise stage3_max_live_parameters or tiered_zero.device_memory_limit, or "
        "lower tiered_zero.unit_size_cap."
    )
