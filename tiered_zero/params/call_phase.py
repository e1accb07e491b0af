"""What the driver is doing, in the one object that says so."""

from __future__ import annotations

from enum import Enum
from typing import final


class Phase(Enum):
    """IDLE: between calls; weights may be read through `gathered` and `state_dict`. FORWARD, BACKWARD: of the engine.
    DROP: gradients of the step are being dropped. STEP: until its update begins. UPDATE: until the step is complete.

    [Note: Interrupted calls]
    A call enters its phase as it begins, and leaves it as the last thing that it does. So a call that finds another
    phase than IDLE knows that the one before was interrupted, by a KeyboardInterrupt at any line, and clears up
    first (`TrainStep.recover`): a forward ends its frames, a backward and a step drop the step's gradients, and after
    an update has begun the engine is latched. All of that can be interrupted and is then done again. It trusts nothing
    that was counted, but waits until lanes and disk are idle, and counts what is there. An exception that is raised in
    a call is the same case: it is cleared up on its way out.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    DROP = "drop"
    STEP = "step"
    UPDATE = "update"


@final
class CallPhase:
    """The phase of the engine's call, and whether autograd runs a backward that the user started past the engine.

    `TrainStep` sets `now`; the pager sets `has_own_backward`, when a backward first needs a parameter. Driver thread,
    or autograd's while the driver waits in backward.
    """

    def __init__(self) -> None:
        self.now = Phase.IDLE
        self.has_own_backward = False

    @property
    def pass_name(self) -> str:
        """ "forward", "backward" or "idle": which pass uses parameters now."""
        if self.has_own_backward or self.now is Phase.BACKWARD:
            return "backward"
        return "forward" if self.now is Phase.FORWARD else "idle"
