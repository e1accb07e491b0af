"""What the driver is doing, and what a call that is broken off must leave as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tiered_zero.grads.check import GradCheck


class Phase(Enum):
    """What the driver is doing. IDLE: between calls; weights may be read through `gathered` and `state_dict`. STEP: up
    to its update, nothing of which has begun. UPDATE: until all that belongs to a step is done.

    [Note: Interrupted calls]
    A call enters its phase as it begins, and leaves it as the last thing that it does. So a call that finds another
    phase than IDLE knows that the one before was broken off, by a KeyboardInterrupt at whichever line, and clears up
    first (`Engine._recover`): a forward ends its frames, a backward and a step drop the step's gradients, and after an
    update has begun the engine is latched. All of that can be interrupted and is then done again. It trusts nothing
    that was counted, but waits until lanes and disk are idle, and counts what is there. An exception that is raised in
    a call is the same case: it is cleared up on its way out.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    UPDATE = "update"


@dataclass
class Counts:
    """What a step that is taken counts, and one that is dropped leaves as it was."""

    micro_steps: int
    global_steps: int
    skipped_steps: int
    skipped_in_a_row: int
    nonfinite_in_a_row: int
    verdict: GradCheck | None
    loss_scaler: Mapping[str, Any] | None
