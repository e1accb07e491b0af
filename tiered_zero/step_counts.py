"""What is counted of backwards, micro-batches and steps."""

from __future__ import annotations

from typing import final

from tiered_zero.grads.check import GradCheck


@final
class StepCounts:
    """Says which `step()` is a boundary, and which backward is the only one before it. Driver thread."""

    def __init__(self, num_micro_batches: int) -> None:
        """`num_micro_batches`: gradient_accumulation_steps."""
        self.num_micro_batches = num_micro_batches
        self.micro_steps = 0
        self.global_steps = 0
        self.grad_check: GradCheck | None = None
        """Of the last step."""
        self.boundary: bool | None = None
        """What the user says of the next `step()`; None: every `num_micro_batches`-th one is a boundary."""
        self.num_backwards = 0
        """Since the last `step()`."""
        self.is_accumulating = False
        """Whether the last `step()` only counted a micro-batch."""
        self._one_backward_each = True  # in every micro-batch so far, and step() right after it
        self._num_uses = 0  # of weights, when the last backward ended

    def is_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return (self.micro_steps + 1) % self.num_micro_batches == 0 if self.boundary is None else self.boundary

    def begin_backward(self, retain_graph: bool) -> bool:
        """Count a backward of the engine; return whether it is expected to be the only one of its micro-batch."""
        self.num_backwards += 1
        return self.num_backwards == 1 and self._one_backward_each and not retain_graph

    def end_backward(self, num_uses: int) -> None:
        self._num_uses = num_uses

    def begin_step(self, num_uses: int) -> bool:
        """Count a micro-batch; return whether its step is a boundary. `num_uses`: of weights, by now."""
        boundary = self.is_boundary()
        self.micro_steps += 1
        used = self.num_backwards and num_uses != self._num_uses
        self._one_backward_each &= self.num_backwards == 1 and not used  # else no update begins in backward any more
        self.num_backwards = 0
        self.is_accumulating = not boundary
        return boundary

    def state(self) -> tuple[int, int, GradCheck | None]:
        return self.micro_steps, self.global_steps, self.grad_check

    def restore(self, state: tuple[int, int, GradCheck | None]) -> None:
        """`state`: what `state()` gave before a step that is dropped."""
        self.micro_steps, self.global_steps, self.grad_check = state

    def drop(self) -> None:
        """Leave out the micro-batches since the last boundary."""
        self.num_backwards = 0
        self.micro_steps -= self.micro_steps % self.num_micro_batches
        self.is_accumulating = False
