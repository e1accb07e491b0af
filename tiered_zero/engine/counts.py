"""Count backward passes, micro-batches and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, final

from tiered_zero.errors import ModelError
from tiered_zero.grads.check import GradCheck


@final
class StepCounts:
    """Counts backwards, micro-batches and steps, and decides which `step()` is a boundary (it updates the weights) and
    which backward is the only one before it. Used on the driver thread, the one that calls the engine."""

    def __init__(self, num_micro_batches: int, *, managed: bool = True) -> None:
        """`num_micro_batches`: gradient_accumulation_steps. `managed`: False if every `step()` is a boundary and every
        backward before it counts as a micro-batch."""
        self.num_micro_batches = num_micro_batches
        self._managed = managed
        self.micro_steps = 0
        self.global_steps = 0
        self.grad_check: GradCheck | None = None
        """The gradient check of the last step."""
        self.boundary: bool | None = None
        """Whether the next `step()` is a boundary, as the user has set; None: every `num_micro_batches`-th one is."""
        self.num_backwards = 0
        """Backwards since the last `step()`."""
        self.is_accumulating = False
        """Whether the last `step()` only counted a micro-batch."""
        self.was_applied = False
        """Whether the last `step()` updated the weights."""
        self._one_backward_each = True  # in every micro-batch so far, and step() right after it
        self._num_uses = 0  # of weights, when the last backward ended

    def is_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if not self._managed:
            return True
        return (self.micro_steps + 1) % self.num_micro_batches == 0 if self.boundary is None else self.boundary

    def begin_backward(self, retain_graph: bool) -> bool:
        """Count a backward of the engine; return whether it is expected to be the only one of its micro-batch."""
        self.num_backwards += 1
        return self.num_backwards == 1 and self._one_backward_each and not retain_graph

    def end_backward(self, num_uses: int) -> None:
        self._num_uses = num_uses

    def check_managed(self, num_own_backwards: int) -> None:
        """Raise ModelError if the user's loop has accumulated gradients by itself before this `optimizer.step()`.
        `num_own_backwards`: calls of `loss.backward()`, not `engine.backward()`, since the last `step()`."""
        num_backwards = self.num_backwards + num_own_backwards
        if self._managed and self.boundary is None and 1 < self.num_micro_batches <= num_backwards:
            raise ModelError(
                f"optimizer.step() came after {num_backwards} backwards and gradient_accumulation_steps is "
                f"{self.num_micro_batches}: the loop accumulates by itself, and the loss would be divided twice. Leave "
                "gradient_accumulation_steps out of the config (1), or call engine.step() after each backward."
            )

    def begin_step(self, num_uses: int) -> bool:
        """Count a micro-batch; return whether its step is a boundary. `num_uses`: how often weights were used so far;
        a use after the backward keeps later updates from beginning in backward."""
        boundary = self.is_boundary()
        self.micro_steps += 1 if self._managed else max(1, self.num_backwards)
        used = self.num_backwards and num_uses != self._num_uses
        self._one_backward_each &= self.num_backwards == 1 and not used  # else no update begins in backward any more
        self.num_backwards = 0
        self.is_accumulating = not boundary
        return boundary

    def state(self) -> tuple[int, int, GradCheck | None]:
        """Return the counts that `restore` sets back if the step is dropped."""
        return self.micro_steps, self.global_steps, self.grad_check

    def restore(self, state: tuple[int, int, GradCheck | None]) -> None:
        """Set the counts back to `state`, the result of `state()` before the step that is dropped."""
        self.micro_steps, self.global_steps, self.grad_check = state

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values, for `load_state_dict`. Call it right after a `step()` that updates."""
        return {
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "boundary": self.boundary,
            "one_backward_each": self._one_backward_each,
            "was_applied": self.was_applied,
            "grad_check": asdict(self.grad_check) if self.grad_check is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counts to `state`, the result of `state_dict()`, which the caller has checked."""
        self.micro_steps, self.global_steps = state["micro_steps"], state["global_steps"]
        self.boundary, self.was_applied = state["boundary"], state["was_applied"]
        if self._managed and self.boundary is None:  # saved with another number of micro-batches
            self.micro_steps -= self.micro_steps % self.num_micro_batches
        self._one_backward_each = state["one_backward_each"]
        self.grad_check = GradCheck(**state["grad_check"]) if state["grad_check"] is not None else None
        self.num_backwards = self._num_uses = 0
        self.is_accumulating = False

    def drop(self) -> None:
        """Set the count of micro-batches back to the last boundary."""
        self.num_backwards = 0
        if self._managed:
            self.micro_steps -= self.micro_steps % self.num_micro_batches
        self.is_accumulating = False
